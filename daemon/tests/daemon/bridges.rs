//! Bridges whose taps are attached as they come and go. Needs root.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nightporter_api::{BridgeStatus, Change, PortStatus};
use nightporter_attach::tap::Tap;
use nix::sys::signal::Signal;

use crate::attached::{G, PATIENT, R, R_ISN, Street, echo, links, member, until};
use crate::host::{Dir, Host, LIMIT};
use crate::uplinks::ip;

/// The street with a network that no bridge's rule attaches.
pub(crate) fn run(test: impl FnOnce(Street) + Send + 'static) {
    Street::run(|Street { vm, network }| {
        drop(network);
        test(Street { vm, network: member("np-out") });
    });
}

pub(crate) fn attach(bridge: &str) -> String {
    format!("[[attach]]\nbridge = \"{bridge}\"\nbudget = \"1M\"\n")
}

/// The name of the VM with this tap.
pub(crate) fn vm_of(tap: &str) -> String {
    let address = std::fs::read_to_string(format!("/sys/class/net/{tap}/address")).unwrap();
    format!("tap-{}", address.trim().replace(':', ""))
}

fn bridge(host: &Host) -> BridgeStatus {
    host.status().bridges.pop().unwrap()
}

/// Waits until these taps of the bridge are the VMs of the daemon, and their programs are there.
fn has(host: &Host, taps: &[&str]) {
    let vms: Vec<_> = taps.iter().map(|tap| (vm_of(tap), format!("{tap:?}"))).collect();
    until(|| {
        let status = host.status();
        let is_its = |port: &PortStatus, (vm, tap): &(String, String)| {
            port.name == *vm && port.link && port.keys.get("tap") == Some(tap)
        };
        status.bridges[0].taps == taps
            && status.ports.len() == 2 * taps.len()
            && vms.iter().all(|vm| status.ports.iter().any(|port| is_its(port, vm)))
    });
}

/// Why a port of the bridge is not attached.
fn why(host: &Host, ifname: &str) -> String {
    let skipped = bridge(host).skipped;
    let of = skipped.iter().find(|it| it.ifname == ifname);
    of.map_or_else(String::new, |it| it.why.clone())
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn taps_of_a_bridge_are_vms_as_they_come_and_go() {
    run(|street| {
        ip("link add veth0 type veth peer name veth1");
        ip("link set veth0 master br0 up");
        let dir = Dir::new();
        let config = dir.configure(PATIENT, &attach("br0"));
        let host = Host::start(&dir, &config);
        has(&host, &["vm0"]);
        assert_eq!(why(&host, "np-out"), "it is a tap of a nightporterd");
        assert_eq!(why(&host, "veth0"), "it is no tap");
        street.sends_frame(G, &echo(7)); // which shows its MAC
        assert_eq!(street.gets_frame(R), echo(7));
        street.connects();
        street.uploads(0, &[1; 1000]);
        assert_eq!(street.gets(R).ack, R_ISN.wrapping_add(1001), "ahead of the VM");
        // One more comes, is renamed, and is another VM's.
        let other = member("vm1");
        has(&host, &["vm0", "vm1"]);
        ip("link set vm1 name vm2");
        has(&host, &["vm0", "vm2"]);
        ip("link set vm2 address 02:00:00:00:00:99");
        has(&host, &["vm0", "vm2"]);
        assert_eq!(vm_of("vm2"), "tap-020000000099");
        // It leaves, comes back, and goes.
        ip("link set vm2 nomaster");
        has(&host, &["vm0"]);
        ip("link set vm2 master br0");
        has(&host, &["vm0", "vm2"]);
        drop(other);
        has(&host, &["vm0"]);
        until(|| links().matches("npv").count() == 1);
    });
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn operators_and_other_daemons_are_asked_before_a_bridge() {
    run(|street| {
        let dir = Dir::new();
        let daemon = format!("{PATIENT}\ntaps = [\"vm*\"]");
        let host = Host::start(&dir, &dir.configure(&daemon, ""));
        let add = |bridge: &str| Change::AddBridge {
            bridge: bridge.into(),
            keys: BTreeMap::from([("budget".into(), "1M".into())]),
        };
        let plan = host.change(add("br0"));
        assert_eq!(plan.section, Some(attach("br0")));
        has(&host, &["vm0"]);
        // Another daemon does not attach it, nor one that no file allows.
        let second = Dir::new();
        let second_host = Host::start(&second, &second.configure(PATIENT, &attach("br0")));
        until(|| why(&second_host, "vm0").contains("another nightporterd has attached it"));
        let _alien = member("alien");
        until(|| why(&host, "alien").contains("does not allow to attach alien"));
        has(&second_host, &["alien"]);
        // A tap that an operator detaches stays plain, and one that he attaches is as he says.
        host.change(Change::RemoveVm { name: vm_of("vm0"), drain_ms: None });
        until(|| why(&host, "vm0").contains("detached by a command"));
        street.sends_frame(G, &echo(1));
        while street.gets_frame(R) != echo(1) {}
        let keys = [("tap", "vm0"), ("budget", "1M")].map(|(k, v)| (k.into(), v.into()));
        drop(second_host);
        host.change(Change::AddVm { name: "web1".into(), keys: BTreeMap::from(keys) });
        until(|| bridge(&host).taps == ["vm0"]);
        assert_eq!(host.names(), ["web1", "web1/net"]);
        host.change(Change::RemoveVm { name: "web1".into(), drain_ms: None });
        // The bridge's keys change, and then it is no more.
        let (what, _) =
            host.refuses(Change::AddBridge { bridge: "br0".into(), keys: BTreeMap::new() });
        assert!(what.contains("attached already, by other keys"), "{what}");
        host.change(Change::RemoveBridge { bridge: "br0".into() });
        host.change(add("br0"));
        let keys = "mtu = 9000\n";
        dir.configure(&daemon, &format!("{}{keys}", attach("br0")));
        let reloaded = host.change(Change::Reload {});
        assert_eq!(reloaded.steps, ["~ attach br0: mtu 1500 -> 9000"]);
        let third = member("vm3");
        has(&host, &["vm3"]);
        assert_eq!(host.port(&vm_of("vm3")).keys["mtu"], "9000");
        dir.configure(&daemon, &attach("br0"));
        host.change(Change::Reload {});
        until(|| {
            !host.port(&vm_of("vm3")).keys.contains_key("mtu")
                || host.port(&vm_of("vm3")).keys["mtu"] == "1500"
        });
        dir.configure(&daemon, "");
        host.change(Change::Reload {});
        until(|| host.names().is_empty());
        assert!(host.status().bridges.is_empty());
        drop(third);
    });
}

/// A bridge with so many taps more; the times until the daemon has started with them, has noticed
/// that all have gone, has attached as many that come, and has ended.
fn serves(street: &Street, count: usize) -> [Duration; 4] {
    let names: Vec<_> = (100..100 + count).map(|n| format!("many{n}")).collect();
    let all = || names.iter().map(|name| member(name)).collect::<Vec<Tap>>();
    let soon = |is_so: &dyn Fn() -> bool| {
        let start = Instant::now();
        let limit = LIMIT + Duration::from_millis(500) * u32::try_from(count).unwrap();
        while !is_so() {
            assert!(start.elapsed() < limit, "{}", links());
        }
        start.elapsed()
    };
    let (taps, dir, start) = (all(), Dir::new(), Instant::now());
    let host = Host::start(&dir, &dir.configure(PATIENT, &attach("br0")));
    let starts = start.elapsed();
    let has = |taps: usize| move |host: &Host| host.names().len() == 2 * taps;
    assert!(has(count + 1)(&host));
    street.sends_frame(G, &echo(1));
    while street.gets_frame(R) != echo(1) {}
    drop(taps);
    let goes = soon(&|| has(1)(&host));
    let taps = all();
    let comes = soon(&|| has(count + 1)(&host));
    host.signal(Signal::SIGTERM);
    let start = Instant::now();
    host.wait();
    drop(taps);
    [starts, goes, comes, start.elapsed()]
}

#[test]
#[ignore = "needs root: it attaches taps"]
fn a_bridge_with_many_taps_is_served() {
    // By hand with 200, for the times.
    let count = std::env::var("NP_TAPS").map_or(8, |count| count.parse().unwrap());
    run(move |street| println!("start, go, come, end: {:?}", serves(&street, count)));
}
