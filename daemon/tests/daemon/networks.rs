//! The virtual TOE of two networks on one daemon: two overlays, two VNIs, the same IP addresses.
//! Needs root.

use nightporter_api::Change;
use nightporter_core::toe::control::Ask;
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::message::{Kind, Request};

use crate::fabric::{PORT, Stranger, fabric, message};
use crate::host::{Dir, Host};
use crate::overlay::{Namespace, VNI, overlay, two_hosts};
use crate::sockets::{SocketGuest, ask, connect, listen, try_connect, until};
use crate::toe::{NATIVE, RESET, SERVER, boot, bytes, toe};

const GREEN: u32 = VNI + 1;

/// A VM: its name, whether its network is the green one, and the last byte of its address.
type Vm = (&'static str, bool, u8);
const ON_ONE: [Vm; 2] = [("a", false, 1), ("x", true, 1)];
const ON_TWO: [Vm; 4] = [("b", false, 2), ("y", true, 2), ("c", false, 3), ("z", true, 4)];

fn mac((_, is_green, ip): Vm) -> String {
    format!("52:54:00:00:0{}:0{ip}", u8::from(is_green))
}

/// The list's stations for these VMs of the host with this last byte.
fn stations(host: u8, vms: &[Vm]) -> String {
    let station = |vm: &Vm| {
        let vni = if vm.1 { GREEN } else { VNI };
        format!(
            "[[station]]\nvni = {vni}\nmac = \"{}\"\nhost = \"192.0.2.{host}\"\n\
             ips = [\"10.0.0.{}\"]\n",
            mac(*vm),
            vm.2
        )
    };
    vms.iter().map(station).collect()
}

/// The configuration of the daemon with this last byte; on both of its overlays it has the same
/// address.
fn configure(dir: &Dir, n: u8, vms: &[Vm], stations: &str) -> std::path::PathBuf {
    let peers: Vec<_> =
        (1..=4).filter(|it| *it != n).map(|it| format!("\"192.0.2.{it}\"")).collect();
    let over = overlay(&format!("192.0.2.{n}"), &peers.join(", "));
    let green = over.replace("over\"", "green-over\"\nnetwork = \"green\"");
    let green = green.replace(&format!("vni = {VNI}"), &format!("vni = {GREEN}"));
    let vm = |vm: &Vm| {
        let network = if vm.1 { "network = \"green\"" } else { "" };
        let ips = format!("mac = \"{}\"\nips = [\"10.0.0.{}\"]", mac(*vm), vm.2);
        dir.vm(vm.0, &format!("{ips}\ntoe = true\n{network}"))
    };
    let vms: String = vms.iter().map(vm).collect();
    dir.configure("metrics = \"off\"", &(format!("[toe]\n{over}{green}") + stations + &vms))
}

/// Two hosts with both networks, of which the second has listeners.
struct World {
    /// Of the first host, by network.
    near: [SocketGuest; 2],
    /// Of the second one: those with one address, then those whose address the other network does
    /// not have.
    far: [SocketGuest; 4],
    one: Host,
    two: Host,
    dirs: [Dir; 2],
    names: (Namespace, Namespace),
}

fn world(more: &str) -> World {
    let names = two_hosts();
    let dirs = [Dir::new(), Dir::new()];
    let list = stations(1, &ON_ONE) + &stations(2, &ON_TWO) + more;
    let one = names.0.start(&dirs[0], &configure(&dirs[0], 1, &ON_ONE, &list));
    let two = names.1.start(&dirs[1], &configure(&dirs[1], 2, &ON_TWO, &list));
    let near = ON_ONE.map(|vm| boot(&dirs[0], vm.0));
    let mut far = ON_TWO.map(|vm| boot(&dirs[1], vm.0));
    for (guest, (.., ip)) in far.iter_mut().zip(ON_TWO) {
        listen(guest, &format!("10.0.0.{ip}:80"));
    }
    World { near, far, one, two, dirs, names }
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn guests_of_two_networks_reach_their_own_alone_also_where_addresses_are_the_same() {
    let World { near, far, one, two, dirs: _dirs, names: _names } = world("");
    let ([mut a, mut x], [mut b, mut y, mut c, mut z]) = (near, far);
    // The same two addresses, twice.
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let (at_x, at_y) = connect(&mut x, &mut y, SERVER);
    let sent = [1, 2, 3, 4].map(|seed| bytes(seed, 300_000));
    for (guest, at, sent) in [
        (&mut a, at_a, &sent[0]),
        (&mut x, at_x, &sent[1]),
        (&mut b, at_b, &sent[2]),
        (&mut y, at_y, &sent[3]),
    ] {
        guest.write(at, sent);
    }
    until(&mut [&mut a, &mut x, &mut b, &mut y], "all is there", |g| {
        [(0, at_a), (1, at_x), (2, at_b), (3, at_y)]
            .iter()
            .all(|(n, at)| g[*n].socket(*at).got.len() == 300_000)
    });
    assert!(b.socket(at_b).got == sent[0] && y.socket(at_y).got == sent[1]);
    assert!(a.socket(at_a).got == sent[2] && x.socket(at_x).got == sent[3]);
    // A VM in the other network only is not reached, on another host or on the same one.
    for (guest, to) in
        [(&mut a, 4), (&mut x, 3), (&mut b, 4), (&mut y, 3), (&mut c, 4), (&mut z, 3)]
    {
        assert_eq!(try_connect(guest, &format!("10.0.0.{to}:80")), Err(NATIVE), "{to}");
    }
    connect(&mut b, &mut c, "10.0.0.3:80");
    connect(&mut y, &mut z, "10.0.0.4:80");
    connect(&mut a, &mut c, "10.0.0.3:80");
    connect(&mut x, &mut z, "10.0.0.4:80");
    // A stream that one network has used is good for the other one.
    let before = fabric(&one).dialed;
    a.close(at_a);
    until(&mut [&mut a, &mut b], "its end", |g| g[1].socket(at_b).has_ended);
    b.close(at_b);
    until(&mut [&mut a, &mut b], "it is over", |_| fabric(&one).idle == 1);
    let (at_x, at_y) = connect(&mut x, &mut y, SERVER);
    x.write(at_x, b"green");
    until(&mut [&mut x, &mut y], "bytes", |g| g[1].socket(at_y).got == b"green");
    assert_eq!((fabric(&one).dialed, fabric(&one).reused), (before, 1));
    assert_eq!((fabric(&two).nonsense, fabric(&two).refused), (0, 0));
    assert_eq!(toe(&two, "b").sockets, 1, "what it has to c");
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn a_host_speaks_for_its_guests_of_one_network_in_no_other() {
    let more = stations(4, &[("far", true, 9)]);
    let World { names, mut far, two, one: _one, dirs: _dirs, near: _near } = world(&more);
    names.0.ip("addr add 192.0.2.4/24 dev v0");
    let asks = |serial, network, from: &str, to: &str| {
        let mut host = Stranger::at(&names.0, 4, PORT);
        let request = Request { network, from: from.parse().unwrap(), to: to.parse().unwrap() };
        let asked = message(serial, Kind::Request { edge: 1 << 16 });
        host.shows(&[0; 32]).says(&asked.emit()).says(&request.emit());
        std::io::Read::read_exact(&mut host.0, &mut [0; 40]).unwrap();
        host
    };
    let refused = Kind::Reset(Errno::NotByToe);
    // Its guest is in the green network; that one's address is another host's in the first.
    assert_eq!(asks(1, VNI, "10.0.0.9:5", SERVER).hears(), refused);
    assert_eq!(asks(2, VNI, "10.0.0.1:5", SERVER).hears(), refused);
    assert_eq!(asks(3, GREEN, "10.0.0.1:5", SERVER).hears(), refused, "x is not its");
    assert_eq!(asks(4, GREEN, "10.0.0.9:5", "10.0.0.3:80").hears(), refused, "c is not green");
    let mut host = asks(5, GREEN, "10.0.0.9:5", SERVER);
    let [b, y, ..] = &mut far;
    let has_one = |guest: &SocketGuest| {
        guest.sockets.iter().any(|(ports, socket)| ports.host >= 1 << 16 && socket.is_open)
    };
    until(&mut [b, y], "y is called", |g| has_one(g[1]));
    assert!(!has_one(b));
    assert!(matches!(host.hears(), Kind::Established { .. }));
    assert_eq!(fabric(&two).nonsense, 0);
}

#[test]
#[ignore = "needs root: it makes network namespaces"]
fn what_goes_in_one_network_ends_nothing_in_the_other() {
    let World { near, far, two, dirs, one: _one, names: _names } = world("");
    let ([mut a, mut x], [mut b, mut y, ..]) = (near, far);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let (at_x, at_y) = connect(&mut x, &mut y, SERVER);
    let is_green_alone = |x: &mut SocketGuest, y: &mut SocketGuest, word: &[u8]| {
        x.write(at_x, word);
        until(&mut [x, y], "bytes", |g| g[1].socket(at_y).got.ends_with(word));
        assert!(!x.socket(at_x).is_reset && !y.socket(at_y).is_reset);
    };
    // Nobody says any more that 10.0.0.1 of the first network is at the first host.
    let list = stations(1, &ON_ONE[1..]) + &stations(2, &ON_TWO);
    configure(&dirs[1], 2, &ON_TWO, &list);
    assert!(two.change(Change::Reload {}).done);
    until(&mut [&mut a, &mut b], "it is reset", |g| {
        g[0].socket(at_a).is_reset && g[1].socket(at_b).is_reset
    });
    assert_eq!(ask(&mut b, Ask::Describe(at_b)), RESET);
    is_green_alone(&mut x, &mut y, b"after the list");
    configure(&dirs[1], 2, &ON_TWO, &(stations(1, &ON_ONE) + &stations(2, &ON_TWO)));
    assert!(two.change(Change::Reload {}).done);
    // A VM of the first network goes.
    let (at_a, _) = connect(&mut a, &mut b, SERVER);
    two.change(Change::RemoveVm { name: "b".into(), drain_ms: None });
    until(&mut [&mut a], "it is reset", |g| g[0].socket(at_a).is_reset);
    is_green_alone(&mut x, &mut y, b"after b");
    assert_eq!(try_connect(&mut a, "10.0.0.4:80"), Err(NATIVE));
}
