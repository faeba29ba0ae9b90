//! `check-trace` as an operator calls it: what it prints, and how it exits.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nightporter_sim::stack::packet::{Segment, build};
use nightporter_sim::wire::TcpFlags;
use pcap_file::pcap::{PcapPacket, PcapWriter};

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
