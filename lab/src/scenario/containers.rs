//! A guest that forwards to a container: R's connections end there, behind a path that only R's TCP
//! controls without the offload (FWD-01 to FWD-04).
//!
//! ```text
//!   R ══ host ══ guest ── inner ══ eth0, a network namespace with the data service
//! ```
//!
//! A container behind a translation of addresses opens connections itself, too.
//!
//! Each case is uploaded to with the offload and without, by turns, so that both have the same
//! machine. Each upload has an address of the container for itself: R remembers the MTU of a way,
//! and the host a server that is far, for ten minutes each.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::data::Header;
use nightporter_guest::peer::{Answer, Ask, Peer};
use serde_json::Value;

use super::MB;
use crate::host::{self, guest_nic, remote_address};
use crate::image::{IP, IPTABLES, PEER, TC};
use crate::transfer::{Outcome, Upload};
use crate::world::{Net, World, guest_name};

/// The container's network namespace.
const CONTAINER: &str = "container";
/// Addresses of the cable between the guest and its container.
const CABLE: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 79, 0, 1), Ipv4Addr::new(10, 79, 0, 2)];

/// And those of IPv6.
const CABLE_6: [Ipv6Addr; 2] =
    [Ipv6Addr::new(0xfd00, 0x79, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 0x79, 0, 0, 0, 0, 0, 2)];

/// Nothing of an upload is waited for longer.
const LIMIT: Duration = Duration::from_secs(20);

/// A container that answers within so long is near (FWD-01).
const NEAR: Duration = Duration::from_millis(2);
/// Attempts until it does, on a busy machine.
const ANSWERS: usize = 200;

/// A quarter of the uploads with the offload is as quick as so many percent of the time that a
/// quarter of those without it takes.
const PERCENT_MAX: u128 = 120;

/// So many percent of the bytes that the guest passes on without the offload: copies of a host are
/// no more than R's.
const BYTES_PERCENT_MAX: u64 = 120;

/// For so long a container sleeps.
const SLEEP: Duration = Duration::from_secs(125);

/// Connections that the container opens itself, with the offload and without.
const OUTWARDS: u64 = 4;

/// A way from the guest to its container.
struct Way {
    name: &'static str,
    /// The guest's commands that make it; their programs come first.
    made_by: &'static [&'static str],
    /// Those before each upload, when the container has shown that it is near, and after it.
    around: [&'static [&'static str]; 2],
    bytes: usize,
    uploads: usize,
    /// The flow stays in the path. Not all of its bytes are acknowledged early, because those above
    /// 256 KiB are acknowledged late (FWD-02), and a quick R sends as much at once.
    stays: bool,
    /// R has to repeat segments without the offload.
    is_bad: bool,
}

// Of a rate far below the machine's, so that the way decides how long an upload takes. The filter
// also cuts super-segments: netem would lose whole ones.

const PLAIN: Way = Way {
    name: "100 Mbit/s",
    made_by: &["tc qdisc add dev inner root handle 1: tbf rate 100mbit burst 15000 limit 4000000"],
    around: [&[], &[]],
    bytes: 2 * MB,
    uploads: 4,
    stays: true,
    is_bad: false,
};

/// The same, from the container.
const BACK: &str =
    "tc -n container qdisc replace dev eth0 root tbf rate 100mbit burst 15000 limit 4000000";

const NARROW: Way = Way {
    name: "MTU 1400",
    // The container does not know of it, or its SYN-ACK would say so.
    made_by: &["ip link set inner mtu 1400"],
    around: [&[], &[]],
    bytes: 2 * MB,
    uploads: 4,
    stays: false,
    is_bad: true,
};

const LOSSY: Way = Way {
    name: "1 of 100 lost",
    made_by: &[
        "ip link set inner mtu 1500",
        "tc qdisc add dev inner parent 1:1 netem loss 1% limit 4000",
    ],
    around: [&[], &[]],
    bytes: 2 * MB,
    uploads: 8,
    stays: true,
    is_bad: true,
};

const SLOW: Way = Way {
    name: "10 Mbit/s, 100 KB of queue, 40 ms",
    made_by: &[
        "tc qdisc del dev inner root",
        "tc qdisc add dev inner root tbf rate 10mbit burst 15000 limit 100000",
    ],
    around: [
        &["tc -n container qdisc add dev eth0 root netem delay 40ms"],
        &["tc -n container qdisc del dev eth0 root"],
    ],
    bytes: MB,
    uploads: 2,
    stays: true,
    is_bad: true,
};

const FAR: Way = Way {
    name: "400 ms",
    made_by: &["ip link set inner mtu 1500"],
    around: [
        &["tc -n container qdisc add dev eth0 root netem delay 400ms"],
        &["tc -n container qdisc del dev eth0 root"],
    ],
    bytes: MB,
    uploads: 1,
    stays: true,
    is_bad: false,
};

/// The commands that make a bridge with a container.
const BRIDGE: [&str; 3] = [
    "ip link add inner type bridge",
    "ip link add port type veth peer name eth0 netns container",
    "ip link set port master inner up",
];

/// By a cable of its own, as a nested VM has it.
pub(super) fn routed(world: &mut World) -> Result<()> {
    connect(world, &["ip link add inner type veth peer name eth0 netns container"])?;
    upload_over_all(world, &[PLAIN, NARROW, LOSSY, SLOW])?;
    run(world, &["tc qdisc del dev inner root"])?;
    connect_6(world)?;
    let addresses = host::behind_6(Net::Nightporter.subnet()).map(IpAddr::from);
    upload_to_all(world, &[PLAIN, NARROW], addresses).context("IPv6")
}

/// By a bridge.
pub(super) fn bridged(world: &mut World) -> Result<()> {
    connect(world, &BRIDGE)?;
    upload_over_all(world, &[PLAIN, NARROW, LOSSY, SLOW])
}

/// By a bridge and a translation of addresses, as Docker has it; and as far away as a client of a
/// VPN may be.
pub(super) fn translated(world: &mut World) -> Result<()> {
    connect(world, &BRIDGE)?;
    let [outside, inside] = CABLE;
    let published = format!("-A PREROUTING -d 10.78.0.0/16 -j DNAT --to-destination {inside}");
    let hidden = format!("-A POSTROUTING -s {outside}/30 ! -o inner -j MASQUERADE");
    for rule in [published, hidden] {
        run(world, &[&format!("iptables -t nat {rule}")])?;
    }
    upload_over_all(world, &[PLAIN, NARROW, FAR])?;
    // Once more, because a busy machine may be the cause.
    transfer_outwards(world)
        .inspect_err(|why| println!("outwards, once more: {why:#}"))
        .or_else(|_| transfer_outwards(world))
        .context("outwards")
}

/// The container sleeps in the middle of an upload, for longer than a guest that refuses bytes is
/// waited for (FWD-06).
pub(super) fn asleep(world: &mut World) -> Result<()> {
    const AWAKE: &str = "tc qdisc replace dev inner root tbf rate 10mbit burst 15000 limit 4000000";
    connect(world, &["ip link add inner type veth peer name eth0 netns container"])?;
    run(world, &[AWAKE])?;
    let address = host::behind(Net::Nightporter.subnet()).next().context("an address")?.into();
    until_near(world, address)?;
    let early_before = world.daemon()?.vm_counter("early_acked_bytes")?;
    let (remote, upload) = (world.remote().clone(), Upload::new(4 * MB, 1));
    let outcome = thread::scope(|scope| -> Result<Outcome> {
        let sender = scope.spawn(|| remote.enter(|| upload.send(address, 2 * SLEEP)));
        while world.daemon()?.vm_counter("early_acked_bytes")? < early_before + MB as u64 {
            ensure!(!sender.is_finished(), "it was not acknowledged early");
            thread::sleep(Duration::from_millis(5)); // polls two conditions: counter, sender
        }
        run(world, &["tc qdisc replace dev inner root netem loss 100%"])?;
        thread::sleep(SLEEP); // the time is what is tested
        run(world, &[AWAKE])?;
        sender.join().expect("does not panic")
    })?;
    println!("delivered after {:?}, of which it slept {SLEEP:?}", outcome.delivered);
    ensure!(outcome.hash_ok, "the container read something else than was sent");
    ensure!(outcome.delivered > SLEEP, "it was over before");
    ensure!(outcome.delivered < SLEEP + LIMIT, "it went on slowly: {:?}", outcome.delivered);
    Ok(())
}

fn upload_over_all(world: &mut World, ways: &[Way]) -> Result<()> {
    let addresses = host::behind(Net::Nightporter.subnet()).map(IpAddr::from);
    upload_to_all(world, ways, addresses)
}

fn upload_to_all(
    world: &mut World,
    ways: &[Way],
    mut addresses: impl Iterator<Item = IpAddr>,
) -> Result<()> {
    ways.iter().try_for_each(|way| {
        run(world, way.made_by)?;
        // Once more, because a busy machine may be the cause.
        upload_over(world, way, &mut addresses)
            .inspect_err(|why| println!("{}, once more: {why:#}", way.name))
            .or_else(|_| upload_over(world, way, &mut addresses))
            .with_context(|| way.name.to_owned())
    })
}

/// Makes the container, and forwards to it; `cable` are the commands for `inner` and its `eth0`.
fn connect(world: &mut World, cable: &[&str]) -> Result<()> {
    let path = "/proc/sys/net/ipv4/ip_forward".to_owned();
    world.guests[0].call(&Command::Write { path, text: "1".to_owned() })?;
    run(world, &[&format!("ip netns add {CONTAINER}")])?;
    run(world, cable)?;
    let [outside, inside] = CABLE;
    let in_container = format!("ip -n {CONTAINER}");
    run(
        world,
        &[
            &format!("ip address add {outside}/30 dev inner"),
            "ip link set inner up",
            &format!("ip route add 10.78.0.0/16 via {inside}"),
            &format!("{in_container} link set lo up"),
            &format!("{in_container} address add {inside}/30 dev eth0"),
            &format!("{in_container} link set eth0 up"),
            &format!("{in_container} route add default via {outside}"),
            // All of these are its own.
            &format!("{in_container} route add local 10.78.0.0/16 dev lo"),
        ],
    )?;
    let namespace = CONTAINER.to_owned();
    world.guests[0].call(&Command::Serve { namespace }).map(drop)
}

/// The same of IPv6. A router takes no addresses from the network: its own is set.
fn connect_6(world: &mut World) -> Result<()> {
    let path = "/proc/sys/net/ipv6/conf/all/forwarding".to_owned();
    world.guests[0].call(&Command::Write { path, text: "1".to_owned() })?;
    let own = host::guest_address_6(Net::Nightporter.subnet());
    let nic = nic_of(world)?;
    let [outside, inside] = CABLE_6;
    let in_container = format!("ip -n {CONTAINER}");
    run(
        world,
        &[
            &format!("ip address add {own}/64 dev {nic} nodad"),
            &format!("ip address add {outside}/126 dev inner nodad"),
            &format!("ip -6 route add fd00:78::/32 via {inside}"),
            &format!("{in_container} address add {inside}/126 dev eth0 nodad"),
            &format!("{in_container} -6 route add default via {outside}"),
            &format!("{in_container} -6 route add local fd00:78::/32 dev lo"),
        ],
    )
}

/// The guest's interface at the daemon.
fn nic_of(world: &mut World) -> Result<String> {
    let address = guest_nic(0, Net::Nightporter.subnet()).address;
    let links: Vec<Value> =
        serde_json::from_str(&output(world, &format!("ip -j address show to {address}"))?)?;
    let name = links.iter().find_map(|link| link["ifname"].as_str());
    name.map(str::to_owned).context("no interface has the guest's address")
}

/// Runs programs of iproute2 and iptables in the guest.
fn run(world: &mut World, commands: &[&str]) -> Result<()> {
    commands.iter().try_for_each(|command| output(world, command).map(drop))
}

/// The output of such a program.
fn output(world: &mut World, command: &str) -> Result<String> {
    let (name, rest) = command.split_once(' ').context("a program and its arguments")?;
    let (program, arguments) = match name {
        "iptables" => (IPTABLES, command),
        "tc" => (TC, rest),
        _ => (IP, rest),
    };
    let (program, environment) = (program.to_owned(), Vec::new());
    let arguments = arguments.split(' ').map(str::to_owned).collect();
    match world.guests[0].call(&Command::Run { program, arguments, environment })? {
        Reply::Ran { ok: true, output } => Ok(output),
        other => bail!("{command} was answered with {other:?}"),
    }
}

/// Connections that were let go for want of budget, or because they end behind the guest.
fn flows_that_left(world: &mut World) -> Result<u64> {
    let daemon = world.daemon()?;
    Ok(daemon.vm_counter("flows_refused")? + daemon.vm_counter("flows_not_local")?)
}

/// Bytes that the guest has passed on to its container, with their headers.
fn carried(world: &mut World) -> Result<u64> {
    let links: Value = serde_json::from_str(&output(world, "ip -j -s link show dev inner")?)?;
    links[0]["stats64"]["tx"]["bytes"].as_u64().context("ip(8) counts no bytes")
}

/// The uploads with the offload and without, and their judgement.
fn upload_over(
    world: &mut World,
    way: &Way,
    addresses: &mut impl Iterator<Item = IpAddr>,
) -> Result<()> {
    let (mut delivered, mut repeated) = ([Vec::new(), Vec::new()], [0, 0]);
    let mut passed_on = [0; 2];
    for upload in 0..way.uploads {
        for offload in [upload % 2 == 1, upload % 2 == 0] {
            let address = addresses.next().context("too few addresses behind the guest")?;
            world.daemon()?.set_offload(&guest_name(0), offload)?;
            until_near(world, address)?;
            run(world, way.around[0])?;
            let early_before = world.daemon()?.vm_counter("early_acked_bytes")?;
            let left_before = flows_that_left(world)?;
            let carried_before = carried(world)?;
            let outcome = upload_to(world, address, way.bytes, upload as u64)?;
            let early = world.daemon()?.vm_counter("early_acked_bytes")? - early_before;
            passed_on[usize::from(offload)] += carried(world)? - carried_before;
            run(world, way.around[1])?;
            let expected = if offload { 1..=way.bytes as u64 } else { 0..=0 };
            ensure!(expected.contains(&early), "{early} bytes acknowledged early: {expected:?}");
            let left = flows_that_left(world)? - left_before;
            ensure!(left == 0 || !way.stays, "the flow has left the path");
            delivered[usize::from(offload)].push(outcome.delivered);
            repeated[usize::from(offload)] += outcome.retransmits;
        }
    }
    ensure!(!way.is_bad || repeated[0] > 0, "R has not noticed how bad the way is");
    let [without, with] = delivered.map(|mut times| {
        times.sort();
        times[times.len() / 4]
    });
    println!(
        "{}: delivered in {with:?} with the offload, in {without:?} without; R has repeated {} \
         and {} segments, the guest has passed on {} and {} bytes",
        way.name, repeated[1], repeated[0], passed_on[1], passed_on[0]
    );
    ensure!(
        passed_on[1] * 100 <= passed_on[0] * BYTES_PERCENT_MAX,
        "{passed_on:?} bytes were passed on to the container, without the offload and with it"
    );
    ensure!(
        with.as_micros() * 100 <= without.as_micros() * PERCENT_MAX,
        "delivered in {with:?} with the offload, in {without:?} without"
    );
    Ok(())
}

/// Connects to the container until it has answered as quickly as one that is near: the quickest of
/// a server's last answers counts (FWD-01). R's view of it is longer than the host's.
fn until_near(world: &World, address: IpAddr) -> Result<()> {
    for _ in 0..ANSWERS {
        if upload_to(world, address, Header::LEN, 0)?.connect < NEAR {
            return Ok(());
        }
    }
    bail!("none of {ANSWERS} answers took less than {NEAR:?}: the machine is too busy")
}

fn upload_to(world: &World, address: IpAddr, bytes: usize, seed: u64) -> Result<Outcome> {
    let upload = Upload::new(bytes, seed);
    let outcome = world.remote().enter(|| upload.send(address, LIMIT)).context("upload")?;
    ensure!(outcome.hash_ok, "the container read something else than was sent");
    Ok(outcome)
}

/// The container opens connections to R, which sees the guest's address: a download and an upload
/// over each, with the offload and without, by turns. The way is that of [`PLAIN`] in both
/// directions.
fn transfer_outwards(world: &mut World) -> Result<()> {
    run(world, &[BACK])?;
    let (name, program) = (CONTAINER.to_owned(), IP.to_owned());
    let arguments = ["netns", "exec", CONTAINER, PEER].map(str::to_owned).to_vec();
    let start = Command::Start { name, program, arguments, environment: Vec::new() };
    world.guests[0].call(&start)?;
    let mut remote = Peer::default();
    let at = (remote_address(Net::Nightporter.subnet()), 0).into();
    let to = match world.remote().enter(|| remote.obey(Ask::Listen { at })) {
        Answer::At { address } => address,
        other => bail!("no listener: {other:?}"),
    };
    let mut times = [[Vec::new(), Vec::new()], [Vec::new(), Vec::new()]];
    for seed in 0..OUTWARDS {
        for offload in [seed % 2 == 1, seed % 2 == 0] {
            world.daemon()?.set_offload(&guest_name(0), offload)?;
            connect_near(world, &mut remote, to)?;
            let early_before = world.daemon()?.vm_counter("early_acked_bytes")?;
            let (bytes, answered) = (2 * MB, true);
            let asks = [Ask::Receive { bytes, answered }, Ask::Send { bytes, seed, answered }];
            let [_, down] = both(world, &mut remote, asks)?;
            let early = world.daemon()?.vm_counter("early_acked_bytes")? - early_before;
            let least = if offload { bytes as u64 / 2 } else { 0 };
            let most = if offload { bytes as u64 + 1 } else { 0 };
            ensure!((least..=most).contains(&early), "{early} bytes acknowledged early");
            let [up, _] = both(world, &mut remote, [asks[1], asks[0]])?;
            times[0][usize::from(offload)].push(down);
            times[1][usize::from(offload)].push(up);
            let whole = Answer::Checked { whole: true };
            ensure!(remote.obey(Ask::Check { seed }) == whole, "R read something else");
            ensure!(say(world, Ask::Check { seed })? == whole, "the container read something else");
        }
    }
    for (direction, both) in ["download", "upload"].iter().zip(times) {
        let [without, with] = both.map(|mut times| {
            times.sort();
            Duration::from_nanos(times[times.len() / 4])
        });
        println!("outwards, {direction}: {with:?} with the offload, {without:?} without");
        ensure!(
            with.as_micros() * 100 <= without.as_micros() * PERCENT_MAX,
            "the container's {direction} took {with:?} with the offload, {without:?} without"
        );
    }
    Ok(())
}

/// The container connects until its connection is a near one: its own answer counts (FWD-01).
fn connect_near(world: &mut World, remote: &mut Peer, to: SocketAddr) -> Result<()> {
    for _ in 0..ANSWERS {
        let far_before = world.daemon()?.vm_counter("flows_not_local")?;
        both(world, remote, [Ask::Connect { to }, Ask::Accept])?;
        if world.daemon()?.vm_counter("flows_not_local")? == far_before {
            return Ok(());
        }
    }
    bail!("none of {ANSWERS} answers was quick: the machine is too busy")
}

/// The container's program and R do as they are asked, at the same time. The nanoseconds of each.
fn both(world: &mut World, remote: &mut Peer, [container, r]: [Ask; 2]) -> Result<[u64; 2]> {
    tell(world, container)?;
    let of_remote = world.remote().enter(|| remote.obey(r));
    let told = [world.guests[0].hear_peer()?, of_remote];
    if let Some(failed) = told.iter().find(|told| matches!(told, Answer::Failed { .. })) {
        bail!("{container:?} in the container, {r:?} of R: {failed:?}");
    }
    Ok(told.map(|told| if let Answer::Done { ns } = told { ns } else { 0 }))
}

fn say(world: &mut World, ask: Ask) -> Result<Answer> {
    tell(world, ask)?;
    world.guests[0].hear_peer()
}

fn tell(world: &mut World, ask: Ask) -> Result<()> {
    let line = serde_json::to_string(&ask)?;
    world.guests[0].send(&Command::Say { name: CONTAINER.to_owned(), line })
}
