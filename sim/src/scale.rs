//! One host with many guests and many flows: memory, events per second, and how the cost of a
//! packet grows.
//!
//! The engine is the real one, driven turn by turn in the order of the daemon's worker: frames in,
//! each followed by what was made of it; the end of the batch; then *every* guest port is asked
//! what waits for it. Rings and system calls are left out. This is a measurement: it has a clock,
//! and its numbers are of the machine it runs on. Each row is a process of its own, so that memory
//! is that row's alone.
//!
//! A row: all flows are opened, one per 10 us of the engine's time, and each carries a segment that
//! is acknowledged early, delivered and acknowledged by its guest. Then pairs of turns are timed:
//! [`TURN_FRAMES`] data segments of as many flows, and what their guests answer. Flow after flow in
//! strides, so that of many flows none is in a cache. Checksums are partial, as a tap hands them
//! over.

use std::process::Command;
use std::time::Instant as Clock;

use anyhow::Context as _;
use nightporter_core::engine::{Engine, EngineConfig, Verdict};
use nightporter_core::limits::{FLOW_BUFFER_MIN, PAGE, pages_for};
use nightporter_core::port::{GuestConfig, PortConfig, PortFeatures, PortId};
use nightporter_core::store::arena::Arena;
use nightporter_core::time::{Duration, Instant};
use nightporter_core::wire::emit::{CsumMode, TcpEmit};
use nightporter_core::wire::packet::{IpAddr16, IpVersion, Seq, TcpFlags, Timestamps};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use serde::{Deserialize, Serialize};

/// Frames in a turn.
pub const TURN_FRAMES: usize = 32;
/// Bytes of a data segment: a full one on Ethernet as Linux sends it.
const PAYLOAD: usize = 1448;
/// Pairs of turns that are timed; the median counts.
const TURNS: usize = 2_000;
/// Flows of the row that growth is counted from: every frame of a turn is of another.
const FEW: usize = 100;
/// From flow to flow; has no divisor in common with powers of ten.
const STRIDE: usize = 618_033;
/// Larger than any frame.
const ROOM: usize = 65_550;
/// The window guests show, without scaling: more is never promised per flow.
const WINDOW: u16 = u16::MAX;
/// Options of a SYN beside timestamps: MSS 1460, SACK permitted, padding.
const SYN_OPTIONS: [u8; 8] = [2, 4, 0x05, 0xb4, 4, 2, 1, 1];
const ISN_REMOTE: u32 = 0xffff_f000;
const ISN_GUEST: u32 = 0x7fff_ffff;
/// The router that all remotes are behind.
const ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// What was measured with so many guests and flows.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Row {
    /// VMs.
    pub guests: usize,
    /// Flows of all VMs together.
    pub flows: usize,
    /// Memory of the process (resident), in bytes.
    pub resident_bytes: usize,
    /// What it grew by while the flows were opened, for each.
    pub flow_bytes: usize,
    /// Adding all ports took so many milliseconds.
    pub ports_ms: f64,
    /// Frames in, frames made and deliveries per second of processor time while flows were opened.
    pub opening_events_per_s: f64,
    /// The same in the timed turns.
    pub events_per_s: f64,
    /// Nanoseconds per data segment: stored, acknowledged, delivered. Without `idle_ns`.
    pub data_ns: f64,
    /// Nanoseconds per ACK of a guest. Without `idle_ns`.
    pub ack_ns: f64,
    /// Nanoseconds per frame of asking guest ports for which nothing waits.
    pub idle_ns: f64,
}

/// Guests and flows of the rows within these limits.
#[must_use]
pub fn rows(guests_max: usize, flows_max: usize) -> Vec<(usize, usize)> {
    let mut rows = Vec::new();
    for guests in [1, 100, 1_000, 10_000] {
        for flows in [1, 100, 1_000, 10_000, 100_000, 1_000_000] {
            let is_corner = flows == guests || flows == FEW || flows >= 10_000;
            if guests <= flows && is_corner && guests <= guests_max && flows <= flows_max {
                rows.push((guests, flows));
            }
        }
    }
    rows
}

/// Runs all rows within the limits, each as `program scale --one` with its numbers, and gives the
/// lines of the table to `tell`.
///
/// # Errors
/// If a row cannot be run: not enough memory, most likely.
pub fn print(guests_max: usize, flows_max: usize, tell: impl Fn(&str)) -> anyhow::Result<()> {
    tell(
        "guests    flows  RSS MB  B/flow  ports ms  opening ev/s  events/s  data ns  ACK ns  \
         idle ports ns (per frame)",
    );
    let mut done: Vec<Row> = Vec::new();
    for (guests, flows) in rows(guests_max, flows_max) {
        let row = child(guests, flows)?;
        tell(&format!(
            "{guests:>6} {flows:>8} {:>7.1} {:>7} {:>9.1} {:>13.0} {:>9.0} {:>8.0} {:>7.0} \
             {:>14.0}",
            row.resident_bytes as f64 / 1e6,
            row.flow_bytes,
            row.ports_ms,
            row.opening_events_per_s,
            row.events_per_s,
            row.data_ns,
            row.ack_ns,
            row.idle_ns,
        ));
        done.push(row);
    }
    if let Some(first) = done.iter().find(|row| row.flows == FEW) {
        let alike = done.iter().rfind(|row| row.guests == first.guests);
        for row in alike.into_iter().chain(done.last()) {
            tell(&growth(first, row));
        }
    }
    tell(&format!(
        "B/flow: memory per idle flow; few flows bear what a guest takes with its first SYN.\n\
         idle ports: every turn asks every guest port whether something waits for it; \
         {TURN_FRAMES} frames share that."
    ));
    Ok(())
}

fn growth(first: &Row, row: &Row) -> String {
    format!(
        "from {} guests and {} flows to {} and {}: a data segment costs {:.1} times as much, an \
         ACK {:.1}; with idle ports {:.1} and {:.1}",
        first.guests,
        first.flows,
        row.guests,
        row.flows,
        row.data_ns / first.data_ns,
        row.ack_ns / first.ack_ns,
        (row.data_ns + row.idle_ns) / (first.data_ns + first.idle_ns),
        (row.ack_ns + row.idle_ns) / (first.ack_ns + first.idle_ns),
    )
}

fn child(guests: usize, flows: usize) -> anyhow::Result<Row> {
    let program = std::env::current_exe().context("this program's path")?;
    let numbers = [guests.to_string(), flows.to_string()];
    let output = Command::new(program)
        .args(["scale", "--one", "--guests", &numbers[0], "--flows", &numbers[1]])
        .output()
        .context("run a row")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{guests} guests, {flows} flows: {errors}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Measures one row in this process.
///
/// # Errors
/// If there is no address space for the arena, or `/proc` does not tell.
///
/// # Panics
/// If the engine does anything else with a frame than expected.
pub fn measure(guests: usize, flows: usize) -> anyhow::Result<Row> {
    let mut host = Host::new(guests, flows)?;
    let before = resident_bytes()?;
    let started = Clock::now();
    let mut made = 0;
    for flow in 0..flows {
        made += host.open(flow);
    }
    let opening_s = started.elapsed().as_secs_f64();
    let after = resident_bytes()?;
    let turns = host.timed_turns();
    let frames = TURN_FRAMES as f64;
    let pair_s =
        (median(&turns.data_ns) + median(&turns.ack_ns) + 2.0 * median(&turns.idle_ns)) / 1e9;
    Ok(Row {
        guests,
        flows,
        resident_bytes: after,
        flow_bytes: after.saturating_sub(before) / flows.max(1),
        ports_ms: host.ports_ms,
        opening_events_per_s: made as f64 / opening_s,
        events_per_s: turns.events as f64 / TURNS as f64 / pair_s,
        data_ns: median(&turns.data_ns) / frames,
        ack_ns: median(&turns.ack_ns) / frames,
        idle_ns: median(&turns.idle_ns) / frames,
    })
}

/// Bytes of memory this process has in use.
fn resident_bytes() -> anyhow::Result<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").context("read /proc/self/statm")?;
    let pages = statm.split(' ').nth(1).context("statm has a second field")?;
    Ok(pages.parse::<usize>()? * 4096)
}

fn median(values: &[f64]) -> f64 {
    crate::figures::measure::quantile(values, 0.5)
}

/// A frame on its way into the engine.
struct Frame {
    port: PortId,
    hdr: VirtioNetHdr,
    bytes: Vec<u8>,
}

/// Times of turns, and what happened in all of them.
struct Turns {
    data_ns: Vec<f64>,
    ack_ns: Vec<f64>,
    idle_ns: Vec<f64>,
    events: usize,
}

struct Host {
    engine: Engine<'static>,
    now: Instant,
    uplink: PortId,
    guests: Vec<PortId>,
    /// Per flow: bytes the remote has sent.
    sent_bytes: Vec<u32>,
    ports_ms: f64,
}

impl Host {
    fn new(guests: usize, flows: usize) -> anyhow::Result<Self> {
        let now = Instant::from_millis(1);
        let flows_each = flows.div_ceil(guests);
        let pages_each = flows_each * usize::try_from(pages_for(FLOW_BUFFER_MIN))?;
        let mut engine = engine(now, guests * flows_each, guests * pages_each)?;
        let config = |mac| GuestConfig {
            mac: Some(mac),
            ips: None,
            ack_offload: true,
            budget_bytes: (pages_each * PAGE) as u64,
            flows_max: u32::try_from(flows_each).unwrap_or(u32::MAX),
            mtu: 1500,
        };
        let features = Some(PortFeatures { csum: true, tso4: true, tso6: true, ecn: true });
        let started = Clock::now();
        let mut add = |config: PortConfig| {
            let port = engine.add_port(now, config);
            let port = port.map_err(|e| anyhow::anyhow!("cannot add a port: {e:?}"))?;
            engine.set_port_features(now, port, features);
            anyhow::Ok(port)
        };
        let uplink = add(PortConfig::uplink("uplink"))?;
        let ports: anyhow::Result<Vec<PortId>> = (0..guests)
            .map(|g| add(PortConfig::guest(format!("vm{g}"), config(guest_mac(g)))))
            .collect();
        let guests = ports?;
        let ports_ms = started.elapsed().as_secs_f64() * 1e3;
        Ok(Self { engine, now, uplink, guests, sent_bytes: vec![0; flows], ports_ms })
    }

    fn guest_of(&self, flow: usize) -> usize {
        flow % self.guests.len()
    }

    /// A handshake, a segment, its delivery and its ACK, one after the other. Returns how many
    /// frames went in and came out.
    fn open(&mut self, flow: usize) -> usize {
        self.now = self.now + Duration::from_micros(10);
        self.engine.handle_timeout(self.now);
        let guest = self.guests[self.guest_of(flow)];
        let syn = self.syn(flow, self.uplink, TcpFlags::SYN);
        let syn_ack = self.syn(flow, guest, TcpFlags::SYN | TcpFlags::ACK);
        let ack = self.segment(flow, self.uplink, TcpFlags::ACK, &[]);
        let mut events = 0;
        for mut frame in [syn, syn_ack, ack] {
            let verdict = self.handle(&mut frame);
            assert!(matches!(verdict.0, Verdict::Forward(_)), "a handshake passes: {verdict:?}");
            events += 1;
        }
        let mut data = self.data(flow, 64);
        let (verdict, made) = self.handle(&mut data);
        assert_eq!(verdict, Verdict::Absorbed, "acknowledged early");
        self.engine.handle_batch_end(self.now);
        let made = made + self.drain();
        let delivered = self.deliver(guest);
        let mut ack = self.segment(flow, guest, TcpFlags::ACK, &[]);
        let (_, late) = self.handle(&mut ack);
        events + 2 + made + delivered + late
    }

    /// Pairs of turns: data, and their ACKs.
    fn timed_turns(&mut self) -> Turns {
        let mut turns =
            Turns { data_ns: Vec::new(), ack_ns: Vec::new(), idle_ns: Vec::new(), events: 0 };
        let flows = self.sent_bytes.len();
        for turn in 0..TURNS {
            self.now = self.now + Duration::from_micros(10);
            self.engine.handle_timeout(self.now);
            let flow = |i: usize| (turn * TURN_FRAMES + i) * STRIDE % flows;
            let mut data: Vec<Frame> =
                (0..TURN_FRAMES).map(|i| self.data(flow(i), PAYLOAD)).collect();
            let events = self.turn(&mut data, &mut turns.data_ns, &mut turns.idle_ns);
            assert!(events > TURN_FRAMES, "ACKs and deliveries: {events}");
            turns.events += events;
            let mut acks: Vec<Frame> = (0..TURN_FRAMES)
                .map(|i| {
                    let guest = self.guests[self.guest_of(flow(i))];
                    self.segment(flow(i), guest, TcpFlags::ACK, &[])
                })
                .collect();
            turns.events += self.turn(&mut acks, &mut turns.ack_ns, &mut turns.idle_ns);
        }
        turns
    }

    /// The worker's turn with these frames.
    fn turn(&mut self, frames: &mut [Frame], busy: &mut Vec<f64>, idle: &mut Vec<f64>) -> usize {
        let started = Clock::now();
        let mut events = frames.len();
        for frame in frames {
            let (verdict, made) = self.handle(frame);
            assert_eq!(verdict, Verdict::Absorbed, "the engine has what it needs");
            events += made;
        }
        self.engine.handle_batch_end(self.now);
        events += self.drain();
        let mut at_work = started.elapsed();
        let asked = Clock::now();
        let mut ready = Vec::new();
        for &guest in &self.guests {
            if self.engine.vm(guest).is_some_and(|vm| !vm.ready.is_empty()) {
                ready.push(guest);
            }
        }
        idle.push(asked.elapsed().as_nanos() as f64);
        let started = Clock::now();
        for guest in ready {
            events += self.deliver(guest);
        }
        let _ = self.engine.poll_timeout();
        at_work += started.elapsed();
        busy.push(at_work.as_nanos() as f64);
        events
    }

    fn handle(&mut self, frame: &mut Frame) -> (Verdict, usize) {
        let verdict =
            self.engine.handle_frame(self.now, frame.port, &mut frame.hdr, &mut frame.bytes);
        (verdict, self.drain())
    }

    fn drain(&mut self) -> usize {
        let mut made = 0;
        while self.engine.poll_transmit(self.now).is_some() {
            made += 1;
        }
        made
    }

    /// The guest takes all there is for it.
    fn deliver(&mut self, guest: PortId) -> usize {
        let mut delivered = 0;
        while self.engine.poll_delivery(self.now, guest, ROOM).is_some() {
            delivered += 1;
        }
        self.engine.handle_guest_progress(self.now, guest, true);
        delivered
    }

    /// The next data segment of the remote.
    fn data(&mut self, flow: usize, len: usize) -> Frame {
        let frame = self.segment(flow, self.uplink, TcpFlags::ACK, &vec![0x5a; len]);
        let sent = &mut self.sent_bytes[flow];
        *sent = sent.wrapping_add(u32::try_from(len).unwrap_or(0));
        frame
    }

    fn syn(&self, flow: usize, from: PortId, flags: TcpFlags) -> Frame {
        let mut frame = self.segment(flow, from, flags, &SYN_OPTIONS);
        // What was emitted as payload becomes options: the header grows by two words. The checksum
        // is partial, it does not cover the header's length.
        frame.bytes[14 + 20 + 12] += 2 << 4;
        frame
    }

    /// A segment from either side, with the newest acknowledgement and a partial checksum.
    fn segment(&self, flow: usize, from: PortId, flags: TcpFlags, payload: &[u8]) -> Frame {
        let g = self.guest_of(flow);
        let [_, a, b, c] = u32::try_from(flow).unwrap_or(0).to_be_bytes();
        let [.., hi, lo] = u32::try_from(g).unwrap_or(0).to_be_bytes();
        let remote = (IpAddr16::from_v4([10, a, b, c]), 40_000);
        let guest = (IpAddr16::from_v4([172, 16, hi, lo]), 80);
        let syn = u32::from(flags.syn());
        let remote_next = ISN_REMOTE.wrapping_add(1).wrapping_add(self.sent_bytes[flow]);
        let guest_next = ISN_GUEST.wrapping_add(1);
        let to_net = from != self.uplink;
        let (dst_mac, src_mac, src, dst, seq, ack) = if to_net {
            (ROUTER, guest_mac(g), guest, remote, guest_next.wrapping_sub(syn), remote_next)
        } else {
            let ack = if flags.ack() { guest_next } else { 0 };
            (guest_mac(g), ROUTER, remote, guest, remote_next.wrapping_sub(syn), ack)
        };
        let l2 = [dst_mac.as_slice(), &src_mac, &[8, 0]].concat();
        let emit = TcpEmit {
            l2: &l2,
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
            window: WINDOW,
            timestamps: Some(Timestamps { tsval: 7, tsecr: if flags.ack() { 7 } else { 0 } }),
            sack: &[],
            ip_id: 0,
        };
        let mut header = [0; TcpEmit::MAX_LEN];
        let len = emit.emit(&mut header, payload.len(), CsumMode::Partial);
        let hdr = emit.partial_hdr(len, payload.len(), u16::MAX);
        Frame { port: from, hdr, bytes: [&header[..len], payload].concat() }
    }
}

fn guest_mac(g: usize) -> [u8; 6] {
    let [a, b, c, d] = u32::try_from(g).unwrap_or(0).to_be_bytes();
    [2, 1, a, b, c, d]
}

/// An engine whose arena can back the promises of all flows. Pages nobody writes take no memory.
fn engine(now: Instant, records: usize, pages: usize) -> anyhow::Result<Engine<'static>> {
    let memory = memmap2::MmapOptions::new()
        .len(Arena::layout_len(records, pages))
        .no_reserve_swap()
        .map_anon()
        .context("address space for the arena")?;
    let memory = Box::leak(Box::new(memory)); // the row's process ends with it
    let arena = Arena::format(memory, records, pages, 1);
    let arena = arena.map_err(|e| anyhow::anyhow!("cannot lay out the arena: {e:?}"))?;
    let flows_max = u32::try_from(records).context("too many flows")?;
    Ok(Engine::new(now, EngineConfig { flows_max, hash_seeds: [1, 2, 3, 4] }, arena))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flow_of_every_guest_is_acknowledged_early_delivered_and_remembered() {
        let mut host = Host::new(30, 900).expect("a small arena");
        for flow in 0..900 {
            let events = host.open(flow);
            assert!(events >= 7, "5 frames in, an ACK and a delivery out: {events}");
        }
        assert_eq!(host.engine.flows().count(), 900);
        let turns = host.timed_turns();
        assert!(turns.events > TURNS * 4 * TURN_FRAMES - 1, "{}", turns.events);
        assert!(
            host.guests
                .iter()
                .all(|&g| host.engine.drops(g).is_some_and(|d| d.iter().sum::<u64>() == 0))
        );
    }

    #[test]
    fn rows_keep_to_the_limits() {
        assert_eq!(rows(1, 100), [(1, 1), (1, 100)]);
        assert_eq!(rows(100, 1_000), [(1, 1), (1, 100), (100, 100)]);
        assert!(rows(10_000, 1_000_000).contains(&(10_000, 1_000_000)));
    }
}
