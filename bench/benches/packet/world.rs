//! An engine with many flows, the turn around it, and the frames that keep them going.

use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::limits::PAGE;
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Ports, Received, Sent, Turn, TurnConfig};
use nightporter_core::wire::emit::{CsumMode, TcpEmit};
use nightporter_core::wire::packet::{IpAddr16, IpVersion, Seq, TcpFlags, Timestamps};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

/// The window the guest offers, without scaling: more is never promised per flow.
const WINDOW: u16 = u16::MAX;
/// MACs 02:…:02 (the guest) and 02:…:01 (the router all remotes are behind), IPv4.
const L2_TO_GUEST: [u8; 14] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x08, 0x00];
const L2_TO_NET: [u8; 14] = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00];
const GUEST: (IpAddr16, u16) = (IpAddr16::from_v4([192, 168, 0, 2]), 80);
/// Sequence number of the remotes' SYNs; their data wraps soon.
const ISN_REMOTE: u32 = 0xffff_f000;
/// Sequence number of the guest's SYN.
const ISN_GUEST: u32 = 0x7fff_ffff;
/// Options of a SYN beside timestamps: MSS 1460, SACK permitted, padding.
const SYN_OPTIONS: [u8; 8] = [2, 4, 0x05, 0xb4, 4, 2, 1, 1];
/// Window scale 7 of the remote of a [`Path::Flood`], and 0 of its guest, so that the remote's
/// window never bounds the sender.
const SCALE_OPTION: [[u8; 4]; 2] = [[1, 3, 3, 7], [1, 3, 3, 0]];
/// `MP_CAPABLE` (RFC 8684 section 3.1): the host must not touch such a flow.
const MPTCP_OPTION: [u8; 12] = [30, 12, 0x01, 0x81, 1, 2, 3, 4, 5, 6, 7, 8];
/// Arena pages per flow: the smallest window a flow reserves, at any alignment.
const PAGES_PER_FLOW: usize = 5;
/// The same of a flow that floods: as much again for the guest's data, and room to grow, of which
/// the sender gets half.
const PAGES_PER_FLOOD: usize = 20;
const UPLINK: PortId = PortId(0);
const GUEST_PORT: PortId = PortId(1);

/// The kinds of a world's flows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    /// Acknowledged early.
    Offloaded,
    /// Must not be touched.
    Passed,
    /// The host sends for the guest, segments of so many payload bytes. It hands over frames of so
    /// many segments.
    Floods(usize, usize),
}

/// The data that a flooding guest has handed over, and its progress: bytes since the handshake.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flood {
    /// Handed over.
    pub(crate) handed: u32,
    /// Left for the remote for the first time.
    pub(crate) left: u32,
    /// Acknowledged by the remote.
    pub(crate) acked: u32,
}

/// A frame on its way into the engine.
pub(crate) struct Frame {
    port: PortId,
    hdr: VirtioNetHdr,
    bytes: Vec<u8>,
}

/// Frames that left in a turn.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) struct Outcome {
    /// By the uplink.
    pub(crate) to_net: usize,
    /// By the guest's ring.
    pub(crate) to_guest: usize,
}

/// The ports of the turn: frames of one port to read, and room for any number of frames.
#[derive(Default)]
struct Queues {
    unread: Vec<Frame>,
    /// How many of `unread` were read.
    read: usize,
    sent: Outcome,
    /// Of each data frame that has left by the uplink: its flow, and the end of its bytes.
    departed: Vec<(usize, u32)>,
}

impl Ports for Queues {
    fn receive(&mut self, port: PortId, buf: &mut [u8]) -> Received {
        let Some(frame) = self.unread.get(self.read).filter(|frame| frame.port == port) else {
            return Received::Empty;
        };
        self.read += 1;
        buf[..frame.bytes.len()].copy_from_slice(&frame.bytes);
        Received::Frame(frame.hdr, frame.bytes.len())
    }

    fn send(&mut self, port: PortId, _: &VirtioNetHdr, parts: &[&[u8]], _waited: bool) -> Sent {
        match port {
            UPLINK => {
                self.sent.to_net += 1;
                if let [header, _, ..] = parts {
                    let payload: usize = parts[1..].iter().map(|part| part.len()).sum();
                    self.departed.push(departed(header, payload));
                }
            }
            _ => self.sent.to_guest += 1,
        }
        Sent::Done
    }
}

/// The flow of a data segment with such a header, and the end of its bytes.
fn departed(header: &[u8], payload: usize) -> (usize, u32) {
    let word = |at: usize| {
        u32::from_be_bytes(header[at..at + 4].try_into().expect("a header of IPv4 and TCP"))
    };
    let (remote, seq) = (word(14 + 16), word(14 + 20 + 4));
    let end = seq.wrapping_add(u32::try_from(payload).expect("a frame"));
    ((remote & 0xff_ffff) as usize, end.wrapping_sub(ISN_GUEST.wrapping_add(1)))
}

/// An engine whose arena can back the promises of `offloaded` flows. Pages nobody writes take no
/// memory.
fn engine(now: Instant, offloaded: usize, pages: usize) -> Engine<'static> {
    let memory = memmap2::MmapOptions::new()
        .len(Arena::layout_len(offloaded, pages))
        .no_reserve_swap()
        .map_anon()
        .expect("address space for the arena");
    let memory = Box::leak(Box::new(memory));
    let arena = Arena::format(memory, offloaded, pages, 1).expect("a fresh mapping fits");
    let config = EngineConfig::new(1 << 20, [1, 2, 3, 4]);
    Engine::new(now, config, arena)
}

/// An uplink, a guest and their connections, one per remote address.
pub(crate) struct World {
    engine: Engine<'static>,
    turn: Turn,
    ports: Queues,
    now: Instant,
    /// Per flow: bytes the remote has sent.
    sent_bytes: Vec<u32>,
    /// Per flow that floods.
    floods: Vec<Flood>,
    /// Payload bytes of a segment of a guest: what is longer is a super-segment.
    mss: u16,
    /// The window field of the remotes' segments.
    remote_window: u16,
}

impl World {
    /// The bench's own part of a flow's memory: its place in `sent_bytes`.
    pub(crate) const OWN_BYTES_PER_FLOW: usize = size_of::<u32>();

    /// A world in which `flows` connections were made, one per tick, and each has carried a
    /// segment of the remote.
    pub(crate) fn new(flows: usize, kind: Kind) -> Self {
        let now = Instant::from_millis(1);
        let (floods, per_flow, mss) = match kind {
            Kind::Floods(payload, segments) => (true, PAGES_PER_FLOOD * segments, payload),
            Kind::Offloaded | Kind::Passed => (false, PAGES_PER_FLOW, usize::from(u16::MAX)),
        };
        let pages = flows * per_flow;
        let mss = u16::try_from(mss).expect("a segment");
        let mut engine = engine(now, flows, pages);
        let mut turn = Turn::new(TurnConfig::default());
        let vm = GuestConfig {
            mac: Some([2, 0, 0, 0, 0, 2]),
            ack_offload: true,
            congestion_offload: floods,
            budget_bytes: (pages * PAGE) as u64,
            flows_max: 1 << 20,
            ..GuestConfig::default()
        };
        for config in [PortConfig::uplink("uplink"), PortConfig::guest("guest", vm)] {
            let port = turn.add_port(now, &mut engine, config).expect("an empty engine has room");
            turn.set_features(now, &mut engine, port, Some(PortFeatures::ALL));
        }
        let ports = Queues::default();
        let handed = vec![Flood::default(); if floods { flows } else { 0 }];
        let sent_bytes = vec![0; flows];
        let remote_window = WINDOW;
        let mut world =
            Self { engine, turn, ports, now, sent_bytes, floods: handed, mss, remote_window };
        for flow in 0..flows {
            world.tick();
            world.shake_hands(flow, kind);
            let data = world.data(flow, 64);
            world.lay_and_turn(vec![data]);
            let ack = world.guest_ack(flow);
            world.lay_and_turn(vec![ack]);
        }
        world
    }

    fn shake_hands(&mut self, flow: usize, kind: Kind) {
        let mut options = [SYN_OPTIONS.to_vec(), SYN_OPTIONS.to_vec()];
        match kind {
            Kind::Offloaded => {}
            Kind::Passed => options.iter_mut().for_each(|of| of.extend(MPTCP_OPTION)),
            Kind::Floods(payload, _) => {
                // The MSS counts the bytes of options, which are timestamps (RFC 6691).
                let mss = u16::try_from(payload + 12).expect("a segment").to_be_bytes();
                for (of, scale) in options.iter_mut().zip(SCALE_OPTION) {
                    of[2..4].copy_from_slice(&mss);
                    of.extend(scale);
                }
            }
        }
        let syn = self.syn(flow, UPLINK, TcpFlags::SYN, &options[0]);
        let syn_ack = self.syn(flow, GUEST_PORT, TcpFlags::SYN | TcpFlags::ACK, &options[1]);
        let ack = self.segment(flow, UPLINK, TcpFlags::ACK, &[]);
        for (frame, to_net, to_guest) in [(syn, 0, 1), (syn_ack, 1, 0), (ack, 0, 1)] {
            let outcome = self.lay_and_turn(vec![frame]);
            let expected = Outcome { to_net, to_guest };
            assert_eq!(outcome, expected, "a handshake passes as it is");
        }
    }

    /// The next data segment of the remote.
    pub(crate) fn data(&mut self, flow: usize, len: usize) -> Frame {
        let payload = vec![0x5a; len];
        let frame = self.segment(flow, UPLINK, TcpFlags::ACK, &payload);
        self.sent_bytes[flow] =
            self.sent_bytes[flow].wrapping_add(u32::try_from(len).expect("small"));
        frame
    }

    /// The guest acknowledges all that the remote has sent.
    pub(crate) fn guest_ack(&self, flow: usize) -> Frame {
        self.segment(flow, GUEST_PORT, TcpFlags::ACK, &[])
    }

    /// The next frame of a guest that floods.
    pub(crate) fn handed(&mut self, flow: usize, len: usize) -> Frame {
        let frame = self.segment(flow, GUEST_PORT, TcpFlags::ACK, &vec![0x5a; len]);
        let handed = &mut self.floods[flow].handed;
        *handed = handed.wrapping_add(u32::try_from(len).expect("small"));
        frame
    }

    /// The remote acknowledges `len` bytes more of a flooding guest's data.
    pub(crate) fn net_ack(&mut self, flow: usize, len: usize) -> Frame {
        let acked = &mut self.floods[flow].acked;
        *acked = acked.wrapping_add(u32::try_from(len).expect("small"));
        self.segment(flow, UPLINK, TcpFlags::ACK, &[])
    }

    /// The remote has all sent bytes except the first `len`.
    pub(crate) fn net_sack(&self, flow: usize, len: usize) -> Frame {
        let Flood { left, acked, .. } = self.floods[flow];
        let number = |n: u32| Seq(ISN_GUEST.wrapping_add(1).wrapping_add(n));
        let from = acked.wrapping_add(u32::try_from(len).expect("small"));
        self.segment_with(flow, UPLINK, TcpFlags::ACK, &[(number(from), number(left))], &[])
    }

    /// Remotes of guests that flood show so much from now on.
    pub(crate) fn set_remote_window(&mut self, bytes: usize) {
        self.remote_window = u16::try_from(bytes >> 7).expect("a window");
    }

    /// How a flood of a guest stands.
    pub(crate) fn flood(&self, flow: usize) -> Flood {
        self.floods[flow]
    }

    /// Lays `frames`, all of one port, there to be read.
    pub(crate) fn lay(&mut self, frames: Vec<Frame>) {
        self.ports = Queues { unread: frames, ..Queues::default() };
    }

    /// A turn of the worker, in which it reads the prepared frames.
    #[inline(never)]
    pub(crate) fn turn(&mut self) -> Outcome {
        if let Some(frame) = self.ports.unread.first() {
            self.turn.wake(frame.port);
        }
        let result = self.turn.run(self.now, &mut self.engine, &mut self.ports);
        result.expect("nothing interrupts it");
        assert!(!self.turn.rest(&mut self.ports), "all was read");
        self.ports.sent
    }

    /// New bytes that have left since frames were laid, with their flows.
    pub(crate) fn departed(&mut self) -> Vec<(usize, usize)> {
        let mut new = vec![];
        for (flow, end) in self.ports.departed.drain(..) {
            let left = &mut self.floods[flow].left;
            let more = end.wrapping_sub(*left);
            if (1..1 << 31).contains(&more) {
                new.push((flow, more as usize));
                *left = end;
            }
        }
        new
    }

    /// Both.
    pub(crate) fn lay_and_turn(&mut self, frames: Vec<Frame>) -> Outcome {
        self.lay(frames);
        let outcome = self.turn();
        self.departed();
        outcome
    }

    /// Time goes by, and all of `frames`, of the remotes before the guest's, is read in turns.
    pub(crate) fn wait_and_turn(&mut self, time: Duration, frames: Vec<Frame>) {
        self.wait(time);
        self.lay(frames);
        loop {
            for port in [UPLINK, GUEST_PORT] {
                self.turn.wake(port);
            }
            let result = self.turn.run(self.now, &mut self.engine, &mut self.ports);
            result.expect("nothing interrupts it");
            if !self.turn.rest(&mut self.ports) && self.ports.read == self.ports.unread.len() {
                return;
            }
        }
    }

    /// 10 microseconds go by, and timers run.
    pub(crate) fn tick(&mut self) {
        self.wait(Duration::from_micros(10));
    }

    /// Time goes by, and timers run.
    pub(crate) fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        self.engine.handle_timeout(self.now);
    }

    fn syn(&self, flow: usize, from: PortId, flags: TcpFlags, options: &[u8]) -> Frame {
        let mut frame = self.segment(flow, from, flags, options);
        // Payload becomes options: the header grows by so many words. The checksum is partial, it
        // does not cover the header's length.
        frame.bytes[L2_TO_NET.len() + 20 + 12] +=
            u8::try_from(options.len() / 4 * 16).expect("small");
        frame
    }

    /// A segment from either side, with the newest acknowledgement and a partial checksum.
    fn segment(&self, flow: usize, from: PortId, flags: TcpFlags, payload: &[u8]) -> Frame {
        self.segment_with(flow, from, flags, &[], payload)
    }

    /// The same with SACK blocks.
    fn segment_with(
        &self,
        flow: usize,
        from: PortId,
        flags: TcpFlags,
        sack: &[(Seq, Seq)],
        payload: &[u8],
    ) -> Frame {
        let [_, a, b, c] = u32::try_from(flow).expect("2^24 remotes").to_be_bytes();
        let remote = (IpAddr16::from_v4([10, a, b, c]), 40_000);
        let syn = u32::from(flags.syn());
        let remote_next = ISN_REMOTE.wrapping_add(1).wrapping_add(self.sent_bytes[flow]);
        let Flood { handed, acked, .. } = self.floods.get(flow).copied().unwrap_or_default();
        let guest_first = ISN_GUEST.wrapping_add(1);
        let guest_next = guest_first.wrapping_add(handed);
        let from_guest = from == GUEST_PORT;
        let (l2, src, dst, seq, ack) = if from_guest {
            (&L2_TO_NET, GUEST, remote, guest_next.wrapping_sub(syn), remote_next)
        } else {
            let ack = if flags.ack() { guest_first.wrapping_add(acked) } else { 0 };
            (&L2_TO_GUEST, remote, GUEST, remote_next.wrapping_sub(syn), ack)
        };
        let emit = TcpEmit {
            l2,
            version: IpVersion::V4,
            src: src.0,
            dst: dst.0,
            tos: 0,
            ttl: 64,
            flow_label: 0,
            src_port: src.1,
            dst_port: dst.1,
            seq: Seq(seq),
            ack: Seq(ack),
            flags,
            window: if from_guest { WINDOW } else { self.remote_window },
            timestamps: Some(Timestamps { tsval: 7, tsecr: if flags.ack() { 7 } else { 0 } }),
            sack,
            ip_id: 0,
        };
        let mut header = [0; TcpEmit::MAX_LEN];
        let len = emit.emit(&mut header, payload.len(), CsumMode::Partial);
        let hdr = emit.partial_hdr(len, payload.len(), self.mss);
        Frame { port: from, hdr, bytes: [&header[..len], payload].concat() }
    }
}
