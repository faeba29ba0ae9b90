//! The messages between two ends, and their form on a fabric.
//!
//! A header of 40 bytes, little-endian; of [`Kind::Data`] the payload follows, of [`Kind::Request`]
//! the addresses ([`Request`]).
//!
//! | bytes | |
//! |---|---|
//! | 0 | version, 1 |
//! | 1 | kind |
//! | 2 | to which side: 0 the opener, 1 the acceptor |
//! | 3 | 1 in a probe of an end whose guest has finished, else 0 |
//! | 4 to 7 | bytes that follow |
//! | 8 to 23 | the connection's name: incarnation, serial |
//! | 24 to 31 | offset, edge, total or sent; of a reset the errno |
//! | 32 to 39 | of a probe the edge |

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::errno::Errno;
use super::id::{ShadowId, Side};

/// Bytes of the header.
pub const LEN: usize = 40;
/// Bytes of the addresses behind the header of a request.
pub const REQUEST_LEN: usize = REQUEST_BYTES as usize;
/// Most bytes of payload in a message: those of one vsock packet (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`
/// of Linux).
pub const DATA_MAX: u32 = 64 * 1024;

const REQUEST_BYTES: u32 = 40;

const VERSION: u8 = 1;
const REQUEST: u8 = 1;
const ESTABLISHED: u8 = 2;
const DATA: u8 = 3;
const CREDIT: u8 = 4;
const FIN: u8 = 5;
const TAKEN: u8 = 6;
const PROBE: u8 = 7;
const RESET: u8 = 8;

/// Why an end gives a connection up: the other one, or the guest, broke the rules.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Breach {
    /// More bytes than there was room for.
    NoRoom,
    /// Bytes where none can be.
    Offset,
    /// Bytes after the end of the stream, or another end.
    AfterEnd,
    /// A message that is not allowed in this state.
    State,
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NoMessage {
    /// Another version of this protocol.
    Version,
    /// An unknown kind.
    Kind,
    /// A side, a flag, a length or an errno that does not exist.
    Value,
}

/// A message's kind and arguments.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// The opener's guest wants to connect and has room for so much. [`Request`] follows.
    Request {
        /// The acceptor may send up to here.
        edge: u64,
    },
    /// The acceptor's guest has accepted.
    Established {
        /// The opener may send up to here.
        edge: u64,
    },
    /// Payload follows.
    Data {
        /// The first byte's offset in the stream.
        offset: u64,
        /// Bytes, 1 to [`DATA_MAX`].
        len: u32,
    },
    /// More room.
    Credit {
        /// The other end may send up to here.
        edge: u64,
    },
    /// Half-close: the guest has finished its stream (VTOE-04).
    Fin {
        /// Length of the stream.
        total: u64,
    },
    /// The answer to a FIN: its guest has the whole stream.
    Taken,
    /// State of this end, after a silence.
    Probe {
        /// Bytes of its guest's stream so far.
        sent: u64,
        /// Whether these are all bytes: a FIN was sent.
        finished: bool,
        /// The other end may send up to here.
        edge: u64,
    },
    /// The connection has failed; before it was established, it is refused.
    Reset(Errno),
}

/// One message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Message {
    /// The connection's name.
    pub id: ShadowId,
    /// The end that the message is for.
    pub to: Side,
    /// Kind and arguments.
    pub kind: Kind,
}

impl Message {
    /// Its header.
    #[must_use]
    pub fn emit(&self) -> [u8; LEN] {
        let (kind, flag, len, a, b) = match self.kind {
            Kind::Request { edge } => (REQUEST, false, REQUEST_BYTES, edge, 0),
            Kind::Established { edge } => (ESTABLISHED, false, 0, edge, 0),
            Kind::Data { offset, len } => (DATA, false, len, offset, 0),
            Kind::Credit { edge } => (CREDIT, false, 0, edge, 0),
            Kind::Fin { total } => (FIN, false, 0, total, 0),
            Kind::Taken => (TAKEN, false, 0, 0, 0),
            Kind::Probe { sent, finished, edge } => (PROBE, finished, 0, sent, edge),
            Kind::Reset(errno) => (RESET, false, 0, errno.number().into(), 0),
        };
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&[VERSION, kind, self.to as u8, u8::from(flag)]);
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
        for (at, word) in [(8, self.id.incarnation), (16, self.id.serial), (24, a), (32, b)] {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Parses a header. Only headers that [`Self::emit`] would write are messages.
    ///
    /// # Errors
    /// See [`NoMessage`].
    pub fn parse(bytes: &[u8; LEN]) -> Result<Self, NoMessage> {
        let len = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let (a, b) = (word(bytes, 24), word(bytes, 32));
        if bytes[0] != VERSION {
            return Err(NoMessage::Version);
        }
        let kind = match bytes[1] {
            REQUEST => Kind::Request { edge: a },
            ESTABLISHED => Kind::Established { edge: a },
            DATA if (1..=DATA_MAX).contains(&len) => Kind::Data { offset: a, len },
            CREDIT => Kind::Credit { edge: a },
            FIN => Kind::Fin { total: a },
            TAKEN => Kind::Taken,
            PROBE => Kind::Probe { sent: a, finished: bytes[3] == 1, edge: b },
            RESET => {
                let errno = u32::try_from(a).ok().and_then(Errno::of);
                Kind::Reset(errno.ok_or(NoMessage::Value)?)
            }
            DATA => return Err(NoMessage::Value),
            _ => return Err(NoMessage::Kind),
        };
        let to = match bytes[2] {
            0 => Side::Opener,
            1 => Side::Acceptor,
            _ => return Err(NoMessage::Value),
        };
        let id = ShadowId { incarnation: word(bytes, 8), serial: word(bytes, 16) };
        let message = Self { id, to, kind };
        // Unused fields must be zero, or a later version could not use them.
        if message.emit() == *bytes { Ok(message) } else { Err(NoMessage::Value) }
    }

    /// The answer to a message of no end. `was_over`: an end of this name was over without an
    /// error. Only a probe is answered: its sender waits for messages that cannot come. Any other
    /// message may be a late one to an end that was over, as may a probe from before the other end
    /// had finished, and a reset could overtake the last messages of that end.
    #[must_use]
    pub const fn for_nobody(&self, was_over: bool) -> Option<Self> {
        let kind = match self.kind {
            Kind::Probe { finished: true, .. } if was_over => Kind::Taken,
            Kind::Probe { .. } if !was_over => Kind::Reset(Errno::Reset),
            _ => return None,
        };
        Some(Self { id: self.id, to: self.to.other(), kind })
    }
}

/// Source and destination of a request, which follow its header.
///
/// The host of the opener vouches for the source (VTOE-09); the guest does not choose it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Request {
    /// The number of the network that both guests are in, the same on both hosts: its VNI where it
    /// has an overlay.
    pub network: u32,
    /// The opener's address and port.
    pub from: SocketAddr,
    /// The destination.
    pub to: SocketAddr,
}

impl Request {
    /// Its bytes: network, ports, addresses as IPv6 (an IPv4 address is mapped, RFC 4291 section
    /// 2.5.5.2). Scope and flow of IPv6 addresses are not carried.
    #[must_use]
    pub fn emit(&self) -> [u8; REQUEST_LEN] {
        let mut bytes = [0; REQUEST_LEN];
        bytes[..4].copy_from_slice(&self.network.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.from.port().to_le_bytes());
        bytes[6..8].copy_from_slice(&self.to.port().to_le_bytes());
        bytes[8..24].copy_from_slice(&octets(self.from.ip()));
        bytes[24..40].copy_from_slice(&octets(self.to.ip()));
        bytes
    }

    /// Parses them.
    ///
    /// # Errors
    /// [`NoMessage::Value`]: no connection has such addresses.
    pub fn parse(bytes: &[u8; REQUEST_LEN]) -> Result<Self, NoMessage> {
        let address = |at: usize, port: usize| {
            let ip: [u8; 16] = bytes[at..at + 16].try_into().expect("sixteen");
            let port = u16::from_le_bytes([bytes[port], bytes[port + 1]]);
            SocketAddr::new(IpAddr::from(ip).to_canonical(), port)
        };
        let network = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let request = Self { network, from: address(8, 4), to: address(24, 6) };
        if request.is_sound() { Ok(request) } else { Err(NoMessage::Value) }
    }

    /// Whether a connection can have these addresses: of one family, each of one host, with ports.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let one =
            |at: SocketAddr| !at.ip().is_unspecified() && !at.ip().is_multicast() && at.port() > 0;
        self.from.is_ipv4() == self.to.is_ipv4() && one(self.from) && one(self.to)
    }
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => Ipv6Addr::octets(&ip),
    }
}

fn word(bytes: &[u8; LEN], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn messages() -> Vec<Message> {
        let id = ShadowId { incarnation: 0x1122_3344_5566_7788, serial: 99 };
        let kinds = [
            Kind::Request { edge: 1 },
            Kind::Established { edge: 1 << 40 },
            Kind::Data { offset: 12345, len: DATA_MAX },
            Kind::Credit { edge: u64::MAX },
            Kind::Fin { total: 0 },
            Kind::Taken,
            Kind::Probe { sent: 5, finished: true, edge: 6 },
            Kind::Probe { sent: 5, finished: false, edge: 6 },
            Kind::Reset(Errno::Refused),
        ];
        let sides = [Side::Opener, Side::Acceptor];
        let all = kinds.iter().flat_map(|kind| sides.map(|to| Message { id, to, kind: *kind }));
        all.collect()
    }

    #[test]
    fn a_message_reads_back() {
        for message in messages() {
            assert_eq!(Message::parse(&message.emit()), Ok(message));
        }
        assert_eq!(
            messages()[4].emit()[..16],
            [1, 3, 0, 0, 0, 0, 1, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]
        );
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let fin = messages()[8].emit();
        let with = |at: usize, byte: u8| {
            let mut bytes = fin;
            bytes[at] = byte;
            Message::parse(&bytes)
        };
        assert_eq!(with(0, 2), Err(NoMessage::Version));
        assert_eq!(with(1, 0), Err(NoMessage::Kind));
        assert_eq!(with(1, 9), Err(NoMessage::Kind));
        for (at, byte) in [(1, DATA), (2, 2), (3, 1), (4, 1), (32, 1)] {
            assert_eq!(with(at, byte), Err(NoMessage::Value), "byte {at}");
        }
    }

    #[test]
    fn a_request_reads_back_and_has_addresses_that_a_connection_can_have() {
        for (from, to) in [("10.0.0.1:5", "10.0.0.2:80"), ("[fd00::1]:5", "[fd00::2]:80")] {
            let request =
                Request { network: 77, from: from.parse().unwrap(), to: to.parse().unwrap() };
            assert_eq!(Request::parse(&request.emit()), Ok(request));
        }
        for (from, to) in [
            ("10.0.0.1:5", "[fd00::2]:80"),
            ("10.0.0.1:0", "10.0.0.2:80"),
            ("10.0.0.1:5", "10.0.0.2:0"),
            ("10.0.0.1:5", "0.0.0.0:80"),
            ("10.0.0.1:5", "224.0.0.1:80"),
            ("[::]:5", "[fd00::2]:80"),
            ("[fd00::1]:5", "[ff02::1]:80"),
        ] {
            let request =
                Request { network: 1, from: from.parse().unwrap(), to: to.parse().unwrap() };
            assert_eq!(Request::parse(&request.emit()), Err(NoMessage::Value), "{from} {to}");
        }
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_would_be_written(
            mut bytes in any::<[u8; LEN]>(), sane: bool,
        ) {
            if sane {
                bytes[0] = VERSION;
                bytes[1] %= 9;
                bytes[2] %= 2;
                bytes[3] %= 2;
            }
            if let Ok(message) = Message::parse(&bytes) {
                prop_assert_eq!(message.emit(), bytes);
            }
        }
    }
}
