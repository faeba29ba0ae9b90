//! Arbitrary requests: right except for one word, or wrong in any way.

use super::{AVAIL, REGIONS, RING_AREA, RINGS, USED};
use arbitrary::Arbitrary;
use vhost::vhost_user::message::FrontendReq as Req;

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) struct Fds {
    pub(super) what: Fd,
    pub(super) count: u8,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Fd {
    Eventfd,
    Pipe,
    Memory,
    Null,
    Socket,
}

/// A number: one of those that matter, or any.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Number {
    Small(u8),
    Power(u8),
    Any(u64),
}

impl Number {
    pub(super) const fn value(self) -> u64 {
        match self {
            Self::Small(n) => n as u64,
            Self::Power(n) => 1 << (n % 64),
            Self::Any(n) => n,
        }
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Bits {
    All,
    Usual,
    Flipped(u8),
    Any(u64),
}

/// A region of [`REGIONS`], with one of its words perhaps changed.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) which: u8,
    pub(super) changed: Option<(u8, Number)>,
}

impl Region {
    /// Guest address, length, user address, place in the file: the order of the message.
    pub(super) fn words(self) -> [u64; 4] {
        let [guest, user, at, len] = REGIONS[usize::from(self.which) % REGIONS.len()];
        let mut words = [guest, len, user, at];
        if let Some((word, number)) = self.changed {
            words[usize::from(word) % 4] = number.value();
        }
        words
    }
}

#[derive(Arbitrary, Clone, Copy, Debug)]
pub(super) enum Ask {
    GetFeatures,
    SetFeatures(Bits),
    GetProtocolFeatures,
    SetProtocolFeatures(Bits),
    QueueNum,
    MemorySlots,
    GetStatus,
    SetStatus(Number),
    Config { offset: u16, size: u16 },
    MemoryTable { count: u8, regions: [Region; 2] },
    AddRegion(Region),
    RemoveRegion(Region),
    Num(u8, Number),
    Addr { ring: u8, place: u8, changed: Option<(u8, Number)> },
    Base(u8, Number),
    Enable(u8, bool),
    Kick(Number),
    Call(Number),
    Err(Number),
    GetBase(u8),
    GetInflight { queues: u16, size: u16 },
    SetInflight { len: Number, offset: Number, queues: u16, size: u16 },
    Reset,
    Word(u8, Number),
}

fn words<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub(super) fn halves<const N: usize>(halves: [u32; N]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_ne_bytes()).collect()
}

impl Bits {
    fn value(self, all: u64) -> u64 {
        match self {
            Self::All => all,
            Self::Usual => all & 0x1_4000_0000 | 1 << 3,
            Self::Flipped(bit) => all ^ 1 << (bit % 64),
            Self::Any(bits) => bits,
        }
    }
}

impl Ask {
    /// Request, payload, and the descriptors that belong to it.
    pub(super) fn message(self) -> (Req, Vec<u8>, Option<Fds>) {
        let fds = |what, count| Some(Fds { what, count });
        let ring = |ring: u8| u32::from(ring) % u32::from(RINGS + 1);
        match self {
            Self::GetFeatures => (Req::GET_FEATURES, vec![], None),
            Self::SetFeatures(bits) => {
                (Req::SET_FEATURES, words([bits.value(0x1_7000_8021)]), None)
            }
            Self::GetProtocolFeatures => (Req::GET_PROTOCOL_FEATURES, vec![], None),
            Self::SetProtocolFeatures(bits) => {
                (Req::SET_PROTOCOL_FEATURES, words([bits.value(0x1_b22f)]), None)
            }
            Self::QueueNum => (Req::GET_QUEUE_NUM, vec![], None),
            Self::MemorySlots => (Req::GET_MAX_MEM_SLOTS, vec![], None),
            Self::GetStatus => (Req::GET_STATUS, vec![], None),
            Self::SetStatus(n) => (Req::SET_STATUS, words([n.value()]), None),
            Self::Config { offset, size } => {
                let mut payload = halves([offset.into(), size.into(), 0]);
                payload.resize(payload.len() + usize::from(size % 300), 0);
                (Req::GET_CONFIG, payload, None)
            }
            Self::MemoryTable { count, regions } => {
                let mut payload = halves([u32::from(count % 4), 0]);
                payload.extend(regions.iter().flat_map(|region| words(region.words())));
                (Req::SET_MEM_TABLE, payload, fds(Fd::Memory, 2))
            }
            Self::AddRegion(region) => {
                let payload = [words([0]), words(region.words())].concat();
                (Req::ADD_MEM_REG, payload, fds(Fd::Memory, 1))
            }
            Self::RemoveRegion(region) => {
                (Req::REM_MEM_REG, [words([0]), words(region.words())].concat(), None)
            }
            Self::Num(n, size) => (Req::SET_VRING_NUM, state(ring(n), size.value()), None),
            Self::Addr { ring: n, place, changed } => {
                let at = REGIONS[0][1] + RING_AREA * u64::from(place % 8);
                let mut addr = [u64::from(ring(n)), at, at + USED, at + AVAIL, 0];
                if let Some((word, number)) = changed {
                    addr[usize::from(word) % 5] = number.value();
                }
                (Req::SET_VRING_ADDR, words(addr), None)
            }
            Self::Base(n, base) => (Req::SET_VRING_BASE, state(ring(n), base.value()), None),
            Self::Enable(n, on) => (Req::SET_VRING_ENABLE, state(ring(n), on.into()), None),
            Self::Kick(n) => (Req::SET_VRING_KICK, words([n.value()]), fds(Fd::Eventfd, 1)),
            Self::Call(n) => (Req::SET_VRING_CALL, words([n.value()]), fds(Fd::Eventfd, 1)),
            Self::Err(n) => (Req::SET_VRING_ERR, words([n.value()]), fds(Fd::Pipe, 1)),
            Self::GetBase(n) => (Req::GET_VRING_BASE, state(ring(n), 0), None),
            Self::GetInflight { queues, size } => {
                (Req::GET_INFLIGHT_FD, inflight(0, 0, queues % 6, size), None)
            }
            Self::SetInflight { len, offset, queues, size } => {
                let payload = inflight(len.value(), offset.value(), queues % 6, size);
                (Req::SET_INFLIGHT_FD, payload, fds(Fd::Memory, 1))
            }
            Self::Reset => (Req::RESET_DEVICE, vec![], None),
            Self::Word(code, n) => {
                let code = Req::try_from(u32::from(code)).unwrap_or(Req::SET_OWNER);
                (code, words([n.value()]), None)
            }
        }
    }
}

fn state(ring: u32, value: u64) -> Vec<u8> {
    halves([ring, u32::try_from(value).unwrap_or(u32::MAX)])
}

fn inflight(len: u64, offset: u64, queues: u16, size: u16) -> Vec<u8> {
    let mut payload = words([len, offset]);
    payload.extend([queues, size].iter().flat_map(|n| n.to_ne_bytes()));
    payload.extend([0; 4]);
    payload
}

/// This request has an answer in every state.
pub(super) const fn is_question(request: Req) -> bool {
    matches!(
        request,
        Req::GET_FEATURES
            | Req::GET_PROTOCOL_FEATURES
            | Req::GET_QUEUE_NUM
            | Req::GET_MAX_MEM_SLOTS
            | Req::GET_STATUS
    )
}
