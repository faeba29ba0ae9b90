//! Taps and macvtaps in a network namespace of the test's own. Needs root.

use std::fs::{File, metadata, remove_file, rename};
use std::net::UdpSocket;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, chown};
use std::process::Command;
use std::thread;
use std::time::Instant;

use nightporter_api::Change;
use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporterd::config::{UplinkConfig, UplinkKind};
use nightporterd::port::tap::TapPort;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::guest::{Guest, PLAIN};
use crate::host::{Dir, Host, LIMIT, NOBODY, copy_for_everybody};

/// Runs a test in a fresh network namespace.
fn in_namespace(test: impl FnOnce() + Send + 'static) {
    // The namespace is this thread's, and goes with it and its descriptors.
    let thread = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        test();
    });
    thread.join().unwrap();
}

pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

fn uplink(kind: UplinkKind, ifname: &str) -> UplinkConfig {
    let (name, ifname) = ("lan".into(), ifname.into());
    UplinkConfig { name, network: None, kind, ifname, create: true, bridge: None }
}

/// The next frame that is IPv4; the kernel sends some IPv6 of its own.
fn next_ipv4(port: &mut TapPort) -> (VirtioNetHdr, Vec<u8>) {
    let mut buf = vec![0; 70_000];
    loop {
        match port.receive(&mut buf) {
            Received::Frame(hdr, len) if buf[12..14] == [8, 0] => {
                return (hdr, buf[..len].to_vec());
            }
            Received::Frame(..) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
#[ignore = "needs root: it makes taps"]
fn a_made_tap_carries_frames_both_ways_with_partial_checksums() {
    in_namespace(|| {
        let mut port = TapPort::open(&uplink(UplinkKind::Tap, "np0")).unwrap();
        ip("addr add 10.0.0.1/24 dev np0");
        ip("neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev np0");
        let socket = UdpSocket::bind("10.0.0.1:700").unwrap();
        socket.send_to(b"to the wire", "10.0.0.2:800").unwrap();
        let (hdr, sent) = next_ipv4(&mut port);
        assert_eq!(&sent[42..], b"to the wire");
        assert!(hdr.needs_csum() && hdr.csum_start == 34 && hdr.csum_offset == 6);
        // Back with addresses and ports exchanged; the checksum stays partial.
        let mut back = sent.clone();
        back[..6].copy_from_slice(&sent[6..12]);
        back[6..12].copy_from_slice(&sent[..6]);
        back[26..30].copy_from_slice(&sent[30..34]);
        back[30..34].copy_from_slice(&sent[26..30]);
        back[34..36].copy_from_slice(&sent[36..38]);
        back[36..38].copy_from_slice(&sent[34..36]);
        let (headers, payload) = back.split_at(42);
        assert_eq!(port.send(&hdr, &[headers, payload]), Sent::Done);
        let mut buf = [0; 100];
        let (n, from) = socket.recv_from(&mut buf).unwrap();
        assert_eq!((&buf[..n], from), (&b"to the wire"[..], "10.0.0.2:800".parse().unwrap()));
    });
}

#[test]
#[ignore = "needs root: it makes taps"]
fn a_tap_that_is_deleted_is_gone_for_reader_and_writer() {
    in_namespace(|| {
        let mut port = TapPort::open(&uplink(UplinkKind::Tap, "np0")).unwrap();
        assert!(port.is_present());
        ip("link set np0 down");
        let down = port.send(&VirtioNetHdr::default(), &[&[0xff; 60]]);
        assert_eq!(down, Sent::Dropped(nightporter_core::drops::DropReason::PortDown));
        ip("link del np0");
        assert!(!port.is_present());
        assert_eq!(port.receive(&mut [0; 100]), Received::Gone);
        assert_eq!(port.send(&VirtioNetHdr::default(), &[&[0xff; 60]]), Sent::Gone);
    });
}

#[test]
#[ignore = "needs root: it makes taps"]
fn an_uplink_that_cannot_be_opened_says_what_to_do() {
    in_namespace(|| {
        let message = |c: &UplinkConfig| TapPort::open(c).unwrap_err().to_string();
        let missing = UplinkConfig { create: false, ..uplink(UplinkKind::Tap, "np0") };
        assert_eq!(
            message(&missing),
            "uplink lan: there is no interface np0\n    fix: ip tuntap add dev np0 mode tap \
             vnet_hdr && ip link set np0 up; or set create = true"
        );
        let _first = TapPort::open(&uplink(UplinkKind::Tap, "np1")).unwrap();
        let busy = message(&uplink(UplinkKind::Tap, "np1"));
        assert!(busy.starts_with("uplink lan: np1 is in use by another process"), "{busy}");
        ip("link add np2 type veth peer name np2-peer");
        let other = message(&uplink(UplinkKind::Tap, "np2"));
        assert!(other.contains("np2 is there, and is no tap"), "{other}");
        let bridge = UplinkConfig { bridge: Some("br9".into()), ..uplink(UplinkKind::Tap, "np3") };
        let bridge = message(&bridge);
        assert!(bridge.contains("fix: ip link add br9 type bridge"), "{bridge}");
        let macvtap = message(&uplink(UplinkKind::Macvtap, "mv0"));
        assert!(macvtap.contains("there is no interface mv0"), "{macvtap}");
        assert!(macvtap.contains("fix: ip link add link eth0 name mv0 type macvtap"), "{macvtap}");
        let other = message(&uplink(UplinkKind::Macvtap, "np2"));
        assert!(other.contains("np2 is no macvtap, or no udev runs"), "{other}");
    });
}

#[test]
#[ignore = "needs root: it makes taps"]
fn an_uplink_whose_frames_get_nowhere_is_down_and_says_why() {
    in_namespace(|| {
        ip("link add br0 type bridge");
        ip("link set br0 up");
        let dir = Dir::new();
        let lan =
            "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\nbridge = \"br0\"\n";
        let ports = format!("{lan}{}", dir.vm("a", ""));
        let host = Host::start(&dir, &dir.configure("metrics = \"off\"", &ports));
        let up = || host.until("lan", |lan| lan.link && lan.trouble.is_none());
        let wrong = |what: &str| {
            let lan = host.until("lan", |lan| lan.trouble.as_deref() == Some(what));
            assert!(!lan.link, "{lan:?}");
        };
        up();
        for (does, what, undoes) in [
            ("link set br0 down", "br0 is down", "link set br0 up"),
            ("link set np0 down", "np0 is down", "link set np0 up"),
        ] {
            ip(does);
            wrong(what);
            ip(undoes);
            up();
        }
        ip("link add br1 type bridge");
        ip("link set np0 master br1");
        wrong("np0 is in br1, not in br0; it is left there");
        ip("link set np0 master br0");
        up();
        ip("link del br0");
        wrong("np0 is not in br0");
        // Two of them in one bridge, into which somebody else has put them.
        let wan = "[[uplink]]\nname = \"wan\"\nkind = \"tap\"\nifname = \"np1\"\n";
        dir.configure("metrics = \"off\"", &format!("{ports}{wan}"));
        host.change(Change::Reload {});
        host.until("wan", |wan| wan.link);
        ip("link set br1 up");
        ip("link set np0 master br1");
        ip("link set np1 master br1");
        let wan = host.until("wan", |wan| wan.trouble.is_some());
        assert_eq!(wan.trouble.unwrap(), "in the same bridge as lan: frames loop");
        assert!(wan.link, "they get too far, but they get somewhere");
    });
}

/// Waits until `ip` says this.
fn until_shown(arguments: &str, what: &str) {
    let start = Instant::now();
    loop {
        let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
        let shown = String::from_utf8(output.stdout).unwrap();
        if shown.contains(what) {
            return;
        }
        assert!(start.elapsed() < LIMIT, "ip {arguments}: still {shown}");
    }
}

#[test]
#[ignore = "needs root: it makes taps"]
fn what_is_missing_at_the_start_keeps_nobody_away_and_is_there_when_it_comes() {
    in_namespace(|| {
        ip("link set lo up"); // with no address at all, every one counts as the host's own
        let dir = Dir::new();
        let uplink = |name: &str, ifname: &str, more: &str| {
            format!(
                "[[uplink]]\nname = \"{name}\"\nkind = \"tap\"\nifname = \"{ifname}\"\n{more}\n"
            )
        };
        let ports = [
            uplink("lan", "np0", "bridge = \"br0\""),
            uplink("wan", "np1", "create = false"),
            "[[overlay]]\nname = \"far\"\nvni = 7\nlocal = \"192.0.2.77\"\n".into(),
            "peers = [\"192.0.2.2\"]\n".into(),
            dir.vm("a", ""),
        ];
        let config = dir.configure("metrics = \"off\"", &ports.concat());
        let host = Host::start(&dir, &config);
        let _guest = Guest::boot(&dir.join("a"), PLAIN);
        host.until("a", |a| a.link);
        let far = "cannot listen on 192.0.2.77:4789: Cannot assign requested address (os error 99)";
        let missing =
            [("lan", "there is no bridge br0"), ("wan", "there is no interface np1"), ("far", far)];
        for (name, what) in missing {
            let port = host.port(name);
            assert_eq!((port.link, port.trouble.as_deref()), (false, Some(what)), "{name}");
        }
        ip("link add br0 type bridge");
        ip("link set br0 up");
        ip("tuntap add dev np1 mode tap vnet_hdr");
        ip("addr add 192.0.2.77/32 dev lo");
        for (name, _) in missing {
            host.until(name, |port| port.link && port.trouble.is_none());
        }
        until_shown("link show np0", "master br0");
        // One that it may make is made again, another waits for who makes it.
        ip("link del np1");
        host.until("wan", |wan| !wan.link);
        ip("link del np0");
        until_shown("link show np0", "master br0");
        host.until("lan", |lan| lan.link && lan.trouble.is_none());
        host.until("wan", |wan| wan.trouble.as_deref() == Some("there is no interface np1"));
        ip("tuntap add dev np1 mode tap vnet_hdr");
        host.until("wan", |wan| wan.link);
    });
}

#[test]
#[ignore = "needs root: it makes taps"]
fn a_file_that_is_not_read_keeps_a_missing_uplink_from_holding_up_control() {
    in_namespace(|| {
        ip("link add br0 type bridge");
        ip("link set br0 up");
        let dir = Dir::new();
        let lan =
            "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\nbridge = \"br0\"\n";
        let config = dir.configure("metrics = \"off\"", &format!("{lan}{}", dir.vm("a", "")));
        let host = Host::start(&dir, &config);
        host.until("lan", |lan| lan.link);
        // Its reader stands until somebody writes, as on a file system that does not answer.
        let kept = dir.join("kept.toml");
        rename(&config, &kept).unwrap();
        mkfifo(&config, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        ip("link del np0");
        let start = Instant::now();
        let stands = loop {
            let mut writes = File::options();
            if let Ok(fifo) = writes.write(true).custom_flags(libc::O_NONBLOCK).open(&config) {
                break fifo;
            }
            assert!(start.elapsed() < LIMIT, "nobody reads it");
        };
        let asked = Instant::now();
        assert!(!host.status().broker_ended);
        assert!(asked.elapsed() < LIMIT / 2, "the broker would have been waited for");
        rename(&kept, &config).unwrap();
        drop(stands);
        host.until("lan", |lan| lan.link);
        host.signal(Signal::SIGTERM);
        assert_eq!(host.wait(), Some(0));
    });
}

#[test]
#[ignore = "needs root: it makes taps"]
fn an_uplink_that_was_taken_out_of_its_bridge_is_put_back_now_and_then() {
    in_namespace(|| {
        ip("link add br0 type bridge");
        ip("link set br0 up");
        ip("link add br1 type bridge");
        let dir = Dir::new();
        let lan =
            "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\nbridge = \"br0\"\n";
        let config = dir.configure("metrics = \"off\"", &format!("{lan}{}", dir.vm("a", "")));
        let host = Host::start(&dir, &config);
        host.until("lan", |lan| lan.link);
        ip("link set np0 master br1");
        host.until("lan", |lan| lan.trouble.is_some());
        until_shown("link show np0", "master br1"); // who did that meant it
        ip("link set np0 nomaster");
        until_shown("link show np0", "master br0");
        host.until("lan", |lan| lan.link && lan.trouble.is_none());
        // An operator who does it again may mean it.
        ip("link set np0 nomaster");
        host.until("lan", |lan| lan.trouble.as_deref() == Some("np0 is not in br0"));
    });
}

#[test]
#[ignore = "needs root: it makes taps"]
fn a_tap_becomes_a_port_of_its_bridge() {
    in_namespace(|| {
        ip("link add br0 type bridge");
        let config = UplinkConfig { bridge: Some("br0".into()), ..uplink(UplinkKind::Tap, "np0") };
        let port = TapPort::open(&config).unwrap();
        let output = Command::new("ip").args(["link", "show", "np0"]).output().unwrap();
        let shown = String::from_utf8(output.stdout).unwrap();
        assert!(shown.contains("master br0") && shown.contains("UP"), "{shown}");
        drop(port);
        // Its place in the bridge is no error the next time.
        ip("tuntap add dev np1 mode tap");
        ip("link set np1 master br0");
        let config = UplinkConfig { ifname: "np1".into(), create: false, ..config };
        TapPort::open(&config).unwrap();
    });
}

/// The Ethernet address of an interface.
fn address(ifname: &str) -> String {
    let output = Command::new("ip").args(["-br", "link", "show", ifname]).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    shown.split_whitespace().nth(2).unwrap().to_owned()
}

#[test]
#[ignore = "needs root: it makes taps"]
fn a_bridge_and_a_made_tap_keep_their_addresses() {
    in_namespace(|| {
        // An address that is higher than nearly all random ones.
        let port = "fc:ff:ff:ff:ff:fe";
        ip("link add br0 type bridge");
        ip("link add eth0 type veth peer name wire");
        ip(&format!("link set eth0 address {port} master br0"));
        assert_eq!(address("br0"), port);
        let dir = Dir::new();
        let vm = dir.vm("a", "");
        let head = "metrics = \"off\"\nbridges = [\"br0\"]";
        let host = Host::start(&dir, &dir.configure(head, &vm));
        let keys = [("kind", "tap"), ("ifname", "np0"), ("bridge", "br0")];
        let keys: Vec<_> = keys.map(|(key, value)| (key.into(), value.into())).into();
        let mut taps = Vec::new();
        for _ in 0..3 {
            let (name, keys) = ("lan".into(), keys.iter().cloned().collect());
            host.change(Change::AddUplink { name, keys });
            taps.push(address("np0"));
            assert_eq!(address("br0"), port, "with {taps:?}");
            host.change(Change::RemoveUplink { name: "lan".into() });
            assert_eq!(address("br0"), port, "after {taps:?}");
        }
        drop(host);
        let lan =
            "[[uplink]]\nname = \"lan\"\nkind = \"tap\"\nifname = \"np0\"\nbridge = \"br0\"\n";
        let config = dir.configure(head, &format!("{lan}{vm}"));
        for _ in 0..2 {
            let host = Host::start(&dir, &config);
            taps.push(address("np0"));
            assert_eq!(address("br0"), port, "with {taps:?}");
            host.signal(Signal::SIGKILL);
            host.wait();
            assert_eq!(address("br0"), port, "after {taps:?}");
        }
        assert!(taps[0].starts_with("fe:") && taps.iter().all(|it| *it == taps[0]), "{taps:?}");
        // A tap that is there has the address that it was given.
        ip("tuntap add dev np0 mode tap vnet_hdr");
        let given = "0a:00:00:00:00:01";
        ip(&format!("link set np0 address {given}"));
        let host = Host::start(&dir, &config);
        assert_eq!(address("np0"), given);
        drop(host);
    });
}

#[test]
#[ignore = "needs root: it makes taps"]
fn a_daemon_of_another_user_with_one_capability_adds_an_uplink_and_a_vm() {
    in_namespace(|| {
        ip("link add br0 type bridge");
        let dir = Dir::new();
        let daemon = "metrics = \"off\"\nbridges = [\"br0\"]";
        let config = dir.configure(daemon, &dir.vm("a", ""));
        chown(dir.join(""), Some(NOBODY), Some(NOBODY)).unwrap();
        let program = copy_for_everybody("uplinks");
        // As udev has it, and as systemd starts it: User=, AmbientCapabilities=.
        let script = format!(
            "mknod -m 0666 $0.tun c 10 200 && mount --bind $0.tun /dev/net/tun && rm $0.tun &&
             exec setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups \
                 --inh-caps=+net_admin --ambient-caps=+net_admin $0 --config $1"
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).arg(&program).arg(&config);
        let host = Host::start_as(&dir, &mut command);
        remove_file(&program).unwrap();
        let keys = |list: &[(&str, &str)]| {
            list.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
        };
        let lan = keys(&[("kind", "tap"), ("ifname", "np0"), ("bridge", "br0")]);
        host.change(Change::AddUplink { name: "lan".into(), keys: lan });
        let shown = Command::new("ip").args(["link", "show", "np0"]).output().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert!(shown.contains("master br0") && shown.contains("UP"), "{shown}");
        let socket = dir.join("b").display().to_string();
        let b = keys(&[("socket", &socket), ("budget", "4M")]);
        host.change(Change::AddVm { name: "b".into(), keys: b });
        let _guest = Guest::boot(&dir.join("b"), PLAIN);
        host.until("b", |port| port.link);
        assert_eq!(metadata(dir.join("b")).unwrap().uid(), NOBODY);
    });
}
