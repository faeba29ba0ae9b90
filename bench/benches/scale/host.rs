//! The host of a row: an engine and its turn, over ports that are queues.

use std::collections::VecDeque;
use std::time::Instant as Clock;

use nightporter_check::frame::Frame;
use nightporter_check::wire::{Segment, TcpFlags};
use nightporter_core::engine::{Engine, EngineConfig};
use nightporter_core::limits::{FLOW_BUFFER_MIN, PAGE, pages_for};
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::turn::{Ports, Received, Sent, Turn, TurnConfig};
use nightporter_core::wire::virtio_net::VirtioNetHdr;

use super::{Error, PAYLOAD, STRIDE, TURN_FRAMES, TURNS};

/// The window guests show, without scaling: more is never promised per flow.
const WINDOW: u16 = u16::MAX;
/// Options of a SYN beside timestamps: MSS 1460, SACK permitted, padding.
const SYN_OPTIONS: [u8; 8] = [2, 4, 0x05, 0xb4, 4, 2, 1, 1];
const ISN_REMOTE: u32 = 0xffff_f000;
const ISN_GUEST: u32 = 0x7fff_ffff;
/// The router that all remotes are behind.
const ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Times of turns, and the events in all of them.
pub(super) struct Turns {
    pub(super) data_ns: Vec<f64>,
    pub(super) ack_ns: Vec<f64>,
    pub(super) events: usize,
}

/// Frames that wait to be read, by port; what is sent is taken at once.
#[derive(Default)]
struct Queues {
    arrived: Vec<VecDeque<Frame>>,
    /// Guests that have been given something since they were asked last.
    given: Vec<bool>,
    sent: usize,
}

impl Ports for Queues {
    fn receive(&mut self, port: PortId, buf: &mut [u8]) -> Received {
        let frame = self.arrived[usize::from(port.0)].pop_front();
        let Some(Frame { hdr, bytes }) = frame else { return Received::Empty };
        buf[..bytes.len()].copy_from_slice(&bytes);
        Received::Frame(hdr, bytes.len())
    }

    fn send(&mut self, port: PortId, _: &VirtioNetHdr, _: &[&[u8]], _: bool) -> Sent {
        self.given[usize::from(port.0)] = true;
        self.sent += 1;
        Sent::Done
    }

    fn progress(&mut self, port: PortId) -> Option<bool> {
        std::mem::take(&mut self.given[usize::from(port.0)]).then_some(true)
    }

    fn wait_for_frames(&mut self, port: PortId) -> bool {
        !self.arrived[usize::from(port.0)].is_empty()
    }
}

pub(super) struct Host {
    engine: Engine<'static>,
    turn: Turn,
    queues: Queues,
    now: Instant,
    uplink: PortId,
    guests: Vec<PortId>,
    /// Per flow: bytes the remote has sent.
    sent_bytes: Vec<u32>,
    pub(super) ports_ms: f64,
}

impl Host {
    pub(super) fn new(guests: usize, flows: usize) -> Result<Self, Error> {
        let now = Instant::from_millis(1);
        let flows_each = flows.div_ceil(guests);
        let pages_each = flows_each * usize::try_from(pages_for(FLOW_BUFFER_MIN))?;
        let mut engine = engine(now, guests * flows_each, guests * pages_each)?;
        let mut turn = Turn::new(TurnConfig::default());
        let config = |mac| GuestConfig {
            mac: Some(mac),
            ips: None,
            ack_offload: true,
            budget_bytes: (pages_each * PAGE) as u64,
            flows_max: u32::try_from(flows_each).unwrap_or(u32::MAX),
            mtu: 1500,
            ..GuestConfig::default()
        };
        let features = Some(PortFeatures { uso: false, ..PortFeatures::ALL });
        let started = Clock::now();
        let mut add = |config: PortConfig| {
            let port = turn.add_port(now, &mut engine, config);
            let port = port.map_err(|e| format!("cannot add a port: {e:?}"))?;
            turn.set_features(now, &mut engine, port, features);
            Ok::<_, Error>(port)
        };
        let uplink = add(PortConfig::uplink("uplink"))?;
        let ports: Result<Vec<PortId>, Error> = (0..guests)
            .map(|g| add(PortConfig::guest(format!("vm{g}"), config(guest_mac(g)))))
            .collect();
        let guests = ports?;
        let ports_ms = started.elapsed().as_secs_f64() * 1e3;
        let places = guests.len() + 1;
        let queues =
            Queues { arrived: vec![VecDeque::new(); places], given: vec![false; places], sent: 0 };
        let sent_bytes = vec![0; flows];
        let mut host = Self { engine, turn, queues, now, uplink, guests, sent_bytes, ports_ms };
        host.turns(); // every port is awake at first
        Ok(host)
    }

    /// Flows in the table.
    pub(super) fn flows(&self) -> usize {
        self.engine.flows().count()
    }

    /// Frames that were dropped.
    pub(super) fn drops(&self) -> u64 {
        let of_port = |port: &PortId| self.engine.drops(*port).map_or(0, |d| d.iter().sum::<u64>());
        self.guests.iter().map(of_port).sum()
    }

    fn guest_of(&self, flow: usize) -> usize {
        flow % self.guests.len()
    }

    /// A handshake, a segment, its delivery and its ACK, each in a turn of its own. Returns how
    /// many frames went in and came out.
    pub(super) fn open(&mut self, flow: usize) -> usize {
        self.now = self.now + Duration::from_micros(10);
        let guest = self.guests[self.guest_of(flow)];
        let mut events = 0;
        for (from, flags) in [
            (self.uplink, TcpFlags::SYN),
            (guest, TcpFlags::SYN | TcpFlags::ACK),
            (self.uplink, TcpFlags::ACK),
        ] {
            let frame = self.segment(flow, from, flags, &[]);
            events += self.take([(from, frame)]);
        }
        let data = self.data(flow, 64);
        let made = self.take([(self.uplink, data)]);
        assert_eq!(made, 3, "a segment, its ACK and its delivery");
        let ack = self.segment(flow, guest, TcpFlags::ACK, &[]);
        events + made + self.take([(guest, ack)])
    }

    /// Pairs of turns: data, and their ACKs.
    pub(super) fn timed_turns(&mut self) -> Turns {
        let mut turns = Turns { data_ns: Vec::new(), ack_ns: Vec::new(), events: 0 };
        let flows = self.sent_bytes.len();
        for turn in 0..TURNS {
            self.now = self.now + Duration::from_micros(10);
            let flow = |i: usize| (turn * TURN_FRAMES + i) * STRIDE % flows;
            let data: Vec<_> =
                (0..TURN_FRAMES).map(|i| (self.uplink, self.data(flow(i), PAYLOAD))).collect();
            turns.events += self.timed(data, &mut turns.data_ns);
            let ack = |i: usize| {
                let guest = self.guests[self.guest_of(flow(i))];
                (guest, self.segment(flow(i), guest, TcpFlags::ACK, &[]))
            };
            let acks: Vec<_> = (0..TURN_FRAMES).map(ack).collect();
            turns.events += self.timed(acks, &mut turns.ack_ns);
        }
        turns
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of a measurement")]
    fn timed(&mut self, frames: Vec<(PortId, Frame)>, ns: &mut Vec<f64>) -> usize {
        let started = Clock::now();
        let events = self.take(frames);
        ns.push(started.elapsed().as_nanos() as f64);
        events
    }

    /// These frames come in, and the worker takes turns until there is nothing left to do. Returns
    /// how many went in and came out.
    fn take(&mut self, frames: impl IntoIterator<Item = (PortId, Frame)>) -> usize {
        let before = self.queues.sent;
        let mut events = 0;
        for (port, frame) in frames {
            self.queues.arrived[usize::from(port.0)].push_back(frame);
            self.turn.wake(port);
            events += 1;
        }
        self.turns();
        events + self.queues.sent - before
    }

    fn turns(&mut self) {
        loop {
            let run = self.turn.run(self.now, &mut self.engine, &mut self.queues);
            run.expect("nobody interrupts");
            if !self.turn.rest(&mut self.queues) {
                return;
            }
        }
    }

    /// The next data segment of the remote.
    fn data(&mut self, flow: usize, len: usize) -> Frame {
        let frame = self.segment(flow, self.uplink, TcpFlags::ACK, &vec![0x5a; len]);
        let sent = &mut self.sent_bytes[flow];
        *sent = sent.wrapping_add(u32::try_from(len).unwrap_or(0));
        frame
    }

    /// A segment from either side, with the newest acknowledgement and a partial checksum.
    fn segment(&self, flow: usize, from: PortId, flags: TcpFlags, payload: &[u8]) -> Frame {
        let g = self.guest_of(flow);
        let [_, a, b, c] = u32::try_from(flow).unwrap_or(0).to_be_bytes();
        let [.., hi, lo] = u32::try_from(g).unwrap_or(0).to_be_bytes();
        let (remote, guest) = ([10, a, b, c], [172, 16, hi, lo]);
        let syn = u32::from(flags.syn());
        let remote_next = ISN_REMOTE.wrapping_add(1).wrapping_add(self.sent_bytes[flow]);
        let guest_next = ISN_GUEST.wrapping_add(1);
        let common = Segment {
            flags,
            window: WINDOW,
            timestamps: Some((7, if flags.ack() { 7 } else { 0 })),
            options: if flags.syn() { SYN_OPTIONS.to_vec() } else { Vec::new() },
            offload: Some(u16::MAX),
            ..Segment::default()
        };
        let segment = if from == self.uplink {
            Segment {
                src_mac: ROUTER,
                dst_mac: guest_mac(g),
                src: remote.into(),
                dst: guest.into(),
                src_port: 40_000,
                dst_port: 80,
                seq: remote_next.wrapping_sub(syn),
                ack: if flags.ack() { guest_next } else { 0 },
                ..common
            }
        } else {
            Segment {
                src_mac: guest_mac(g),
                dst_mac: ROUTER,
                src: guest.into(),
                dst: remote.into(),
                src_port: 80,
                dst_port: 40_000,
                seq: guest_next.wrapping_sub(syn),
                ack: remote_next,
                ..common
            }
        };
        segment.frame(payload)
    }
}

fn guest_mac(g: usize) -> [u8; 6] {
    let [a, b, c, d] = u32::try_from(g).unwrap_or(0).to_be_bytes();
    [2, 1, a, b, c, d]
}

/// An engine whose arena can back the promises of all flows. Pages nobody writes take no memory.
fn engine(now: Instant, records: usize, pages: usize) -> Result<Engine<'static>, Error> {
    let memory = memmap2::MmapOptions::new()
        .len(Arena::layout_len(records, pages))
        .no_reserve_swap()
        .map_anon()?;
    let memory = Box::leak(Box::new(memory)); // the row's process ends with it
    let arena = Arena::format(memory, records, pages, 1);
    let arena = arena.map_err(|e| format!("cannot lay out the arena: {e:?}"))?;
    let flows_max = u32::try_from(records)?;
    Ok(Engine::new(now, EngineConfig::new(flows_max, [1, 2, 3, 4]), arena))
}
