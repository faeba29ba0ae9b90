//! The checkers of two captures on those of simulated runs; and `check-trace` as an operator calls
//! it: what it prints, and how it exits.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nightporter_check::rule::Rule;
use nightporter_check::trace::{self, Options, Report};
use nightporter_check::wire::{Packet, Segment, TcpFlags, build};
use nightporter_sim::plan::{FaultKind, Machine, Plan, StackKind, StackPlan, Workload};
use nightporter_sim::report::{Packets, write_pcap};
use nightporter_sim::world::World;
use pcap_file::pcap::{PcapPacket, PcapReader, PcapWriter};

const G_MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];

/// A capture of one frame: R's SYN with this window.
fn capture(dir: &Path, name: &str, window: u16) -> PathBuf {
    let syn = Segment {
        src_mac: [2, 0, 0, 0, 0, 9],
        dst_mac: G_MAC,
        src: [10, 0, 0, 2].into(),
        dst: [10, 0, 0, 1].into(),
        src_port: 4000,
        dst_port: 80,
        flags: TcpFlags::SYN,
        window,
        ..Segment::default()
    };
    let frame = build(&syn, &[]);
    let path = dir.join(name);
    let mut pcap = PcapWriter::new(File::create(&path).unwrap()).unwrap();
    let len = u32::try_from(frame.len()).unwrap();
    pcap.write_packet(&PcapPacket::new(Duration::from_secs(7), len, &frame)).unwrap();
    path
}

/// Exit code, standard output and standard error.
fn check(remote: &Path, guest: &Path) -> (i32, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_nightporter-sim"))
        .args(["check-trace", "--whole", "--guest-mac", "52:54:00:00:00:01", "--remote"])
        .arg(remote)
        .arg("--guest")
        .arg(guest)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
}

#[test]
fn it_exits_with_0_11_or_2_and_says_why() {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let sent = capture(dir, "sent.pcap", 500);
    let changed = capture(dir, "changed.pcap", 600);
    let (code, out, _) = check(&sent, &sent);
    assert_eq!((code, out.contains("1 connections")), (0, true), "{out}");
    let (code, out, _) = check(&sent, &changed);
    assert_eq!(code, 11, "{out}");
    assert!(out.starts_with("7.000000000 10.0.0.1:80 <-> 10.0.0.2:4000: INV-16"), "{out}");
    let (code, _, error) = check(&sent, &dir.join("is not there.pcap"));
    assert_eq!((code, error.contains("open")), (2, true), "{error}");
    let broken = dir.join("broken.pcap");
    std::fs::write(&broken, "This is a text, and no capture.").unwrap();
    let (code, _, error) = check(&broken, &sent);
    assert_eq!((code, error.contains("remote side: not a pcap file")), (2, true), "{error}");
}

/// The captures of a run, and what has to be known besides.
struct Captures {
    /// The remote's side, the guests' side.
    paths: [PathBuf; 2],
    options: Options,
}

impl Captures {
    fn check(&self) -> Report {
        let [remote, guest] = self.paths.each_ref().map(|path| File::open(path).unwrap());
        trace::check(remote, guest, &self.options).unwrap()
    }

    /// Exchanges two words in the payload of the last long segment to a guest: the checksum stays
    /// right. Whether there was one.
    fn tamper(&self) -> bool {
        let mut frames = read(&self.paths[1]);
        let guests = &self.options.guests;
        let is_it = |frame: &[u8]| {
            let is_guest = |at: usize| guests.iter().any(|mac| frame[at..at + 6] == *mac);
            let packet = Packet::parse(frame).ok()?;
            let (_, tcp) = packet.tcp()?;
            let at = tcp.payload_offset as usize;
            let right = is_guest(0)
                && !is_guest(6)
                && tcp.payload_len > 100
                && frame[at..at + 2] != frame[at + 2..at + 4];
            right.then_some(at)
        };
        let last = frames.iter_mut().rev().find_map(|(_, frame)| Some((is_it(frame)?, frame)));
        let Some((at, frame)) = last else { return false };
        frame[at..at + 4].rotate_left(2);
        let frames = frames.iter().map(|(ns, bytes)| (*ns, bytes.as_slice()));
        write_pcap(&self.paths[1], frames).unwrap();
        true
    }
}

fn read(path: &Path) -> Vec<(u64, Vec<u8>)> {
    let mut reader = PcapReader::new(File::open(path).unwrap()).unwrap();
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet() {
        let packet = packet.unwrap();
        let ns = u64::try_from(packet.timestamp.as_nanos()).unwrap();
        frames.push((ns, packet.data.into_owned()));
    }
    frames
}

/// Runs what has no events that captures cannot tell of, with both captures.
fn simulated(seed: u64) -> Option<Captures> {
    let mut plan = Plan::from_seed(seed);
    // That somebody is behind a guest is not seen.
    plan.guests.iter_mut().for_each(|guest| guest.forwards = None);
    // Long streams show a reader of captures nothing that short ones do not.
    for conn in &mut plan.conns {
        if let Workload::Bulk { up, down } | Workload::HalfClose { up, down } = &mut conn.workload {
            (*up, *down) = ((*up).min(150_000), (*down).min(150_000));
        }
    }
    let silent = |kind: FaultKind| {
        matches!(
            kind,
            FaultKind::Crash { .. }
                | FaultKind::Destroy { .. }
                | FaultKind::Migrate { .. }
                | FaultKind::Forge { .. }
                | FaultKind::OneWay { .. }
        )
    };
    let mut stacks =
        plan.guests.iter().map(|g| &g.stack).chain(plan.remotes.iter().map(|r| &r.stack));
    // Behind extension headers all passes as it is, and is not compared.
    let odd = |s: &StackPlan| s.kind == StackKind::Hostile || s.quirks.extension_header;
    // Of connections that follow each other on the same ports captures do not say whose a late
    // RST is.
    let reused = plan.conns.iter().any(|conn| conn.reuse.is_some());
    let sends = plan.guests.iter().any(|guest| guest.congestion_offload);
    if reused || stacks.any(odd) || plan.faults.iter().any(|f| silent(f.kind)) {
        return None;
    }
    let mut packets = Packets::new(None, 0);
    assert_eq!(World::new(&plan, true, Some(&mut packets)).run().violation, None, "seed {seed}");
    let base = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("simulated-{seed}"));
    let guests = (0..u16::try_from(plan.guests.len()).unwrap())
        .map(|g| Machine::Guest(g).address().mac)
        .collect();
    let options = Options { guests, offload: true, sends, whole: true, attached: false };
    Some(Captures { paths: packets.write(&base).unwrap(), options })
}

#[test]
fn simulated_runs_pass_until_a_frame_is_tampered_with() {
    let (mut runs, mut offloaded, mut tampered) = (0, 0, 0);
    for captures in (0..60).filter_map(simulated) {
        let report = captures.check();
        assert_eq!(report.findings, [], "{report:?}");
        (runs, offloaded) = (runs + 1, offloaded + report.offloaded);
        if captures.tamper() {
            let findings = captures.check().findings;
            assert_eq!(findings.len(), 1, "run {runs}: {findings:?}");
            // R's own segment, of which nothing fits, passes as it is; now it is not that any more.
            let rules = [Rule::BytesToGuest, Rule::Immutable, Rule::DeliveryFits];
            assert!(rules.contains(&findings[0].violation.rule), "{findings:?}");
            tampered += 1;
        }
        captures.paths.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    }
    assert!(runs >= 10 && offloaded >= 20 && tampered >= 5, "{runs} {offloaded} {tampered}");
}
