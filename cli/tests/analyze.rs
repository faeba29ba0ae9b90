//! `nightporter analyze` on captures that are written here, byte by byte.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nightporter_check::wire::{Segment, TcpFlags, build};
use nightporter_core::monitor::log::Log;
use nightporter_core::monitor::{Side, Way};
use nightporter_core::time::Instant;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// The first numbers of R and G: R's wraps after 1,000 bytes.
const ISN: [u32; 2] = [u32::MAX - 1000, 77];
/// When everything begins, in nanoseconds since 1970.
const BEGIN: u64 = 1_700_000_000_123_456_000;

/// A directory that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("np-analyze-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn analyze(arguments: &[&str]) -> Output {
    let mut tool = Command::new(env!("CARGO_BIN_EXE_nightporter"));
    tool.args(["--control", "/nowhere/control", "analyze"]).args(arguments).output().unwrap()
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--json"]].concat();
    serde_json::from_str(&text(&analyze(&arguments))).unwrap()
}

/// A frame, and nanoseconds since [`BEGIN`].
type Timed = (u64, Vec<u8>);

/// A segment of R (true) or of G, with relative numbers.
fn segment(of_r: bool, flags: TcpFlags, seq: u32, ack: u32, len: usize) -> Vec<u8> {
    let (own, other) = if of_r { (ISN[0], ISN[1]) } else { (ISN[1], ISN[0]) };
    let (r, g) = (([192, 0, 2, 9].into(), 4000), ([192, 0, 2, 1].into(), 80));
    let ((src, src_port), (dst, dst_port)) = if of_r { (r, g) } else { (g, r) };
    let (seq, ack) = (own.wrapping_add(seq), other.wrapping_add(ack));
    let s = Segment {
        src,
        dst,
        src_port,
        dst_port,
        seq,
        ack,
        flags,
        window: 5000,
        ..Segment::default()
    };
    build(&s, &vec![7; len])
}

/// R sends three segments of 1,000 bytes. The host acknowledges each at once, its guest all of them
/// at 80 ms. The network's side, then the guest's.
fn upload() -> [Vec<Timed>; 2] {
    const MS: u64 = 1_000_000;
    let (syn, ack) = (TcpFlags::SYN, TcpFlags::ACK);
    let handshake = [
        (0, segment(true, syn, 0, 0, 0)),
        (10 * MS, segment(false, syn | ack, 0, 1, 0)),
        (20 * MS, segment(true, ack, 1, 1, 0)),
    ];
    let mut net = handshake.to_vec();
    let later = |(at, frame): &Timed| (at + 5_000, frame.clone());
    let mut guest: Vec<_> = handshake.iter().map(later).collect();
    (guest[1].0, net[1].0) = (10 * MS - 5_000, 10 * MS);
    for n in 0..3 {
        let at = 30 * MS + u64::from(n) * MS;
        net.push((at, segment(true, ack, 1 + n * 1000, 1, 1000)));
        net.push((at + 10_000, segment(false, ack, 1, 1001 + n * 1000, 0)));
    }
    guest.push((70 * MS, segment(true, ack, 1, 1, 3000))); // merged
    guest.push((80 * MS, segment(false, ack, 1, 3001, 0)));
    [net, guest]
}

/// pcap: in units of so many nanoseconds, with numbers written by `of`.
fn pcap(frames: &[Timed], unit: u64, of: fn(u32) -> [u8; 4], link: u32) -> Vec<u8> {
    let magic = if unit == 1 { 0xa1b2_3c4d } else { 0xa1b2_c3d4 };
    let version = if of(1)[0] == 1 { [2, 0, 4, 0] } else { [0, 2, 0, 4] };
    let mut out = [of(magic), version, of(0), of(0), of(262_144), of(link)].concat();
    for (at, frame) in frames {
        let ns = BEGIN + at;
        let part = u32::try_from(ns % 1_000_000_000 / unit).unwrap();
        let len = u32::try_from(frame.len()).unwrap();
        out.extend(of(u32::try_from(ns / 1_000_000_000).unwrap()));
        out.extend([of(part), of(len), of(len)].concat());
        out.extend(frame);
    }
    out
}

/// A block of pcapng.
fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let padded = body.len().next_multiple_of(4);
    let len = u32::try_from(padded + 12).unwrap().to_le_bytes();
    let mut out = [kind.to_le_bytes(), len].concat();
    out.extend(body);
    out.resize(8 + padded, 0);
    out.extend(len);
    out
}

/// pcapng with two interfaces, of which the second is used: its times are in nanoseconds after an
/// hour before the present, or in 2^-20 s.
fn pcapng(frames: &[Timed], binary: bool) -> Vec<u8> {
    let hour = 3600_u64;
    let mut out = block(
        0x0a0d_0d0a,
        &[0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255],
    );
    out.extend(block(1, &[1, 0, 0, 0, 0, 0, 4, 0]));
    let offset = if binary { 0 } else { hour };
    let mut interface =
        vec![1, 0, 0, 0, 0, 0, 4, 0, 9, 0, 1, 0, if binary { 0x80 | 20 } else { 9 }, 0, 0, 0];
    interface.extend([14, 0, 8, 0]);
    interface.extend(offset.to_le_bytes());
    interface.extend([0; 4]);
    out.extend(block(1, &interface));
    out.extend(block(4, &[0; 4])); // names of hosts: none
    for (at, frame) in frames {
        let ns = BEGIN + at;
        let units = if binary {
            u64::try_from((u128::from(ns) << 20) / 1_000_000_000).unwrap()
        } else {
            ns - hour * 1_000_000_000
        };
        let len = u32::try_from(frame.len()).unwrap().to_le_bytes();
        let [low, high] = [units & u64::from(u32::MAX), units >> 32]
            .map(|word| u32::try_from(word).unwrap().to_le_bytes());
        let mut body = [1_u32.to_le_bytes(), high, low, len, len].concat();
        body.extend(frame);
        out.extend(block(6, &body));
    }
    out
}

/// The frames without Ethernet headers, behind what Linux has for `any`, or nothing.
fn cooked(frames: &[Timed], header: &[u8]) -> Vec<Timed> {
    let cook = |(at, frame): &Timed| (*at, [header, &frame[14..]].concat());
    frames.iter().map(cook).collect()
}

fn us(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is a time"))
}

/// `a` is at most an eighth more than `b`, as the bins of times allow.
fn is_about(a: f64, b: f64) -> bool {
    (b..=b * 1.13).contains(&a)
}

#[test]
fn two_sides_show_where_the_time_goes_and_who_acknowledged() {
    let (dir, [net, guest]) = (Dir::new("sides"), upload());
    let net = dir.write("net.pcap", &pcap(&net, 1000, u32::to_le_bytes, 1));
    let guest = dir.write("guest.pcap", &pcap(&guest, 1000, u32::to_le_bytes, 1));
    let report = json(&[&net, &guest]);
    let connection = &report["connections"][0];
    assert_eq!(connection["remote"], "192.0.2.9:4000");
    assert_eq!(connection["guest"], "192.0.2.1:80");
    assert!((us(&connection["handshake_us"]) - 20_000.0).abs() < 1.0);
    let host = &connection["host"][0];
    assert_eq!((&host["way"], &host["early_bytes"]), (&"to_guest".into(), &3000.into()));
    assert_eq!((&host["own_bytes"], &host["backwards"]), (&0.into(), &0.into()));
    // The segments came at 30, 31 and 32 ms, and left at 70.
    assert_eq!(host["delay"]["count"], 3);
    assert!(is_about(us(&host["delay"]["longest_us"]), 40_000.0), "{host}");
    assert!(is_about(us(&host["lead"]["p50_us"]), 48_990.0), "{host}");
    let at = |n: usize| &connection["streams"][n];
    assert_eq!((&at(0)["side"], &at(2)["side"]), (&"network".into(), &"guest".into()));
    assert_eq!(at(0)["acked_bytes"], 3000, "behind the wrap, too");
    assert!(is_about(us(&at(0)["acked_after"]["p50_us"]), 10.0), "{}", at(0));
    assert!(is_about(us(&at(2)["acked_after"]["longest_us"]), 10_000.0), "{}", at(2));
    let said = text(&analyze(&[&net, &guest]));
    assert!(said.contains("2.9K bytes by the host, 0 by the receiver"), "{said}");
    assert!(!said.contains("left before they came"), "{said}");
    let swapped = text(&analyze(&[&guest, &net, "--vm", "192.0.2.1"]));
    assert!(swapped.contains("give the network's side first"), "{swapped}");
}

#[test]
fn every_format_has_the_same_connection() {
    let (dir, [net, _]) = (Dir::new("formats"), upload());
    let read = |name: &str, bytes: &[u8]| {
        let report = json(&[&dir.write(name, bytes)]);
        (report["captures"][0].clone(), report["connections"].clone())
    };
    let le = u32::to_le_bytes;
    let (capture, wanted) = read("a", &pcap(&net, 1000, le, 1));
    assert_eq!(capture["frames"], 9);
    assert_eq!(wanted.as_array().unwrap().len(), 1);
    assert!((us(&capture["begins_s"]) - 1_700_000_000.123_456).abs() < 1e-6);
    let sll = [0, 0, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    let sll2 = [8, 0, 0, 0, 0, 0, 0, 2, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0];
    for (name, bytes) in [
        ("ns", pcap(&net, 1, le, 1)),
        ("big-endian", pcap(&net, 1000, u32::to_be_bytes, 1)),
        ("fcs", pcap(&net, 1000, le, 1 | 0x2400_0000)),
        ("pcapng", pcapng(&net, false)),
    ] {
        let (capture, got) = read(name, &bytes);
        assert_eq!(got, wanted, "{name}");
        assert_eq!(capture["end"], "whole", "{name}");
    }
    // These have other frames around the same packets, or another clock.
    for (name, bytes) in [
        ("raw", pcap(&cooked(&net, &[]), 1000, le, 101)),
        ("sll", pcap(&cooked(&net, &sll), 1000, le, 113)),
        ("sll2", pcap(&cooked(&net, &sll2), 1000, le, 276)),
        ("binary", pcapng(&net, true)),
    ] {
        let (_, got) = read(name, &bytes);
        for key in ["segments", "acked_bytes", "acks", "repeated"] {
            let of = |it: &Value| it[0]["streams"][0][key].clone();
            assert_eq!(of(&got), of(&wanted), "{name}: {key}");
        }
        let of = |it: &Value| us(&it[0]["handshake_us"]);
        assert!((of(&got) - of(&wanted)).abs() < 3.0, "{name}: {} µs", of(&got));
    }
}

#[test]
fn a_cut_or_damaged_file_shows_what_it_has() {
    let (dir, [net, _]) = (Dir::new("damage"), upload());
    let whole = pcap(&net, 1000, u32::to_le_bytes, 1);
    let cut = dir.write("cut", &whole[..whole.len() - 3]);
    let report = json(&[&cut]);
    assert_eq!(report["captures"][0]["end"], "cut");
    assert_eq!(report["captures"][0]["frames"], 8);
    assert!(text(&analyze(&[&cut])).contains("ends in the middle of a frame"));

    let ng = pcapng(&net, false);
    let mut damaged = ng.clone();
    let at = ng.len() - 60;
    damaged[at..].fill(0xff);
    let report = json(&[&dir.write("damaged", &damaged)]);
    let capture = &report["captures"][0];
    assert!(capture["end"] != "whole", "{capture}");
    assert_eq!(capture["frames"], 8, "{capture}");

    // A frame that says it has 4 GiB.
    let mut huge = whole.clone();
    huge[24 + 8..24 + 12].fill(0xff);
    let output = analyze(&[&dir.write("huge", &huge)]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("no frame could be read"), "{said}");
}

#[test]
fn what_is_no_capture_is_an_error_that_says_what_to_do() {
    let dir = Dir::new("errors");
    let one = dir.write("one", &pcap(&upload()[0], 1000, u32::to_le_bytes, 1));
    let empty = dir.write("empty", &[]);
    let other = dir.write("other", b"PNG, for example, and more than a header's bytes");
    let nowhere = Path::new(&one).with_file_name("nowhere").display().to_string();
    for (arguments, said) in [
        (&[nowhere.as_str()][..], "cannot read"),
        (&[empty.as_str()], "is empty"),
        (&[other.as_str()], "is neither pcap nor pcapng\n    fix: capture with tcpdump -w"),
        (&[one.as_str(), "--flow", "2"], "there is no connection 2\n    fix: use a number from 1"),
        (&[one.as_str(), "--csv", "/nowhere/x"], "cannot write /nowhere/x"),
    ] {
        let output = analyze(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(said), "{arguments:?}: {stderr}");
    }
}

#[test]
fn csv_and_svg_have_all_connections() {
    let (dir, [net, guest]) = (Dir::new("files"), upload());
    let net = dir.write("net.pcap", &pcap(&net, 1000, u32::to_le_bytes, 1));
    let guest = dir.write("guest.pcap", &pcap(&guest, 1000, u32::to_le_bytes, 1));
    let [csv, svg] = ["x.csv", "x.svg"].map(|name| dir.0.join(name));
    let of = |path: &Path| path.to_str().unwrap().to_owned();
    text(&analyze(&[&net, &guest, "--csv", &of(&csv), "--svg", &of(&svg)]));
    let csv = std::fs::read_to_string(csv).unwrap();
    let rows: Vec<Vec<_>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows.len(), 1 + 4, "both directions at both sides: {csv}");
    assert!(rows.iter().all(|row| row.len() == rows[0].len()), "{csv}");
    let column = rows[0].iter().position(|name| *name == "early_bytes").unwrap();
    assert_eq!(rows[1][column], "3000");
    let svg = std::fs::read_to_string(svg).unwrap();
    for said in ["<svg", "guest: until it acknowledges", "between ACKs, data to the guest"] {
        assert!(svg.contains(said), "{said}");
    }
}

#[test]
fn frames_of_others_than_the_vm_are_left_out() {
    let (dir, [net, _]) = (Dir::new("vm"), upload());
    let net = dir.write("net.pcap", &pcap(&net, 1000, u32::to_le_bytes, 1));
    let mine = json(&[&net, "--vm", "192.0.2.9"]);
    assert_eq!(mine["connections"][0]["guest"], "192.0.2.9:4000", "R is the VM, if one says so");
    assert_eq!(mine["connections"][0]["streams"][1]["acked_bytes"], 3000);
    let none = json(&[&net, "--vm", "192.0.2.77"]);
    assert_eq!(none["connections"], Value::Array(Vec::new()));
    assert!(text(&analyze(&[&net, "--vm", "192.0.2.77"])).contains("no connection"));
}

/// `nightporter monitor` of a daemon that says all of [`upload`], and then waits for its client's
/// end, which `ends` brings about.
fn monitored(name: &str, arguments: &[&str], ends: impl FnOnce(&Child)) -> Value {
    let dir = Dir::new(name);
    let control = dir.0.join("control");
    let listener = UnixListener::bind(&control).unwrap();
    let mut tool = Command::new(env!("CARGO_BIN_EXE_nightporter"));
    tool.arg("--control").arg(&control).args(["--json", "monitor", "web1"]).args(arguments);
    let tool = tool.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut client = BufReader::new(listener.accept().unwrap().0);
    let mut request = String::new();
    client.read_line(&mut request).unwrap();
    assert_eq!(request, "{\"cmd\":\"monitor\",\"vm\":\"web1\"}\n");
    let mut log = Log::new(BEGIN);
    let [net, guest] = upload();
    let sides = [(Side::Net, net), (Side::Guest, guest)];
    let mut frames: Vec<_> = sides
        .into_iter()
        .flat_map(|(side, frames)| frames.into_iter().map(move |(at, frame)| (at, side, frame)))
        .collect();
    frames.sort_by_key(|(at, ..)| *at);
    for (at, side, frame) in frames {
        let is_of_r = frame[34..36] == 4000_u16.to_be_bytes();
        let way = if is_of_r { Way::ToGuest } else { Way::FromGuest };
        log.push(Instant::from_nanos(at), (side, way), &[&frame]);
    }
    client.get_mut().write_all(&[&b"{\"stream\":{}}\n"[..], &log.take()].concat()).unwrap();
    ends(&tool);
    // It hangs up, although its daemon would have more.
    assert_eq!(client.read_line(&mut request).unwrap(), 0);
    let output = tool.wait_with_output().unwrap();
    serde_json::from_str(&text(&output)).unwrap()
}

#[test]
fn a_monitor_shows_what_two_captures_do() {
    let dir = Dir::new("live");
    let [net, guest] = upload().map(|frames| pcap(&frames, 1, u32::to_le_bytes, 1));
    let files = [dir.write("net", &net), dir.write("guest", &guest)];
    let captured = json(&[&files[0], &files[1]]);
    for live in [
        monitored("for", &["--for", "300ms"], |_| {}),
        monitored("signal", &[], |tool| {
            let pid = Pid::from_raw(tool.id().cast_signed());
            kill(pid, Signal::SIGINT).unwrap();
        }),
    ] {
        for part in ["connections", "all", "traffic"] {
            assert_eq!(live[part], captured[part], "{part}");
        }
        let it = &live["captures"][0];
        assert_eq!(
            (&it["file"], &it["side"], &it["frames"]),
            (&"web1".into(), &"both".into(), &14.into())
        );
        assert_eq!((&it["end"], &it["missed"]), (&"whole".into(), &0.into()));
    }
}
