//! A guest that forwards to a container: R's connections end there, behind a path that only R's TCP
//! controls without the offload (FWD-01 to FWD-04).
//!
//! ```text
//!   R ══ host ══ guest ── inner ══ eth0, a network namespace with the data service
//! ```
//!
//! Each case is uploaded to with the offload and without, by turns, so that both have the same
//! machine. Each upload has an address of the container for itself: R remembers the MTU of a way,
//! and the host a server that is far, for ten minutes each.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::data::Header;

use super::MB;
use crate::host;
use crate::image::{IP, TC};
use crate::transfer::{Outcome, Upload};
use crate::world::{Net, World, guest_name};

/// The container's network namespace.
const CONTAINER: &str = "container";
/// Addresses of the cable between the guest and its container.
const CABLE: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 79, 0, 1), Ipv4Addr::new(10, 79, 0, 2)];

/// Nothing of an upload is waited for longer.
const LIMIT: Duration = Duration::from_secs(20);

/// A container that answers within so long is near (FWD-01).
const NEAR: Duration = Duration::from_millis(2);
/// Attempts until it does, on a busy machine.
const ANSWERS: usize = 200;

/// A quarter of the uploads with the offload is as quick as so many percent of the time that a
/// quarter of those without it takes.
const PERCENT_MAX: u128 = 120;

/// A way from the guest to its container.
struct Way {
    name: &'static str,
    /// The guest's commands that make it; their programs come first.
    made_by: &'static [&'static str],
    /// Those before each upload, when the container has shown that it is near, and after it.
    around: [&'static [&'static str]; 2],
    bytes: usize,
    uploads: usize,
    /// Of an upload so many are acknowledged early, at least.
    early: u64,
    /// R has to repeat segments without the offload.
    is_bad: bool,
}

/// Of a rate far below the machine's, so that the way decides how long an upload takes. The filter
/// also cuts super-segments: netem would lose whole ones.
const WAYS: [Way; 4] = [
    Way {
        name: "100 Mbit/s",
        made_by: &[
            "tc qdisc add dev inner root handle 1: tbf rate 100mbit burst 15000 limit 4000000",
        ],
        around: [&[], &[]],
        bytes: 2 * MB,
        uploads: 4,
        early: 250_000,
        is_bad: false,
    },
    Way {
        name: "MTU 1400",
        // The container does not know of it, or its SYN-ACK would say so.
        made_by: &["ip link set inner mtu 1400"],
        around: [&[], &[]],
        bytes: 2 * MB,
        uploads: 4,
        early: 1,
        is_bad: true,
    },
    Way {
        name: "1 of 100 lost",
        made_by: &[
            "ip link set inner mtu 1500",
            "tc qdisc add dev inner parent 1:1 netem loss 1% limit 4000",
        ],
        around: [&[], &[]],
        bytes: 2 * MB,
        uploads: 8,
        early: 250_000,
        is_bad: true,
    },
    Way {
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
        early: 250_000,
        is_bad: true,
    },
];

/// By a cable of its own, as a nested VM has it.
pub(super) fn routed(world: &mut World) -> Result<()> {
    upload_over_all(world, &["ip link add inner type veth peer name eth0 netns container"])
}

/// By a bridge, as Docker has it.
pub(super) fn bridged(world: &mut World) -> Result<()> {
    let cable = [
        "ip link add inner type bridge",
        "ip link add port type veth peer name eth0 netns container",
        "ip link set port master inner up",
    ];
    upload_over_all(world, &cable)
}

fn upload_over_all(world: &mut World, cable: &[&str]) -> Result<()> {
    connect(world, cable)?;
    let mut addresses = host::behind(Net::Nightporter.subnet());
    WAYS.iter().try_for_each(|way| {
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

/// Runs iproute2's programs in the guest.
fn run(world: &mut World, commands: &[&str]) -> Result<()> {
    for command in commands {
        let mut words = command.split(' ');
        let program = match words.next() {
            Some("tc") => TC,
            _ => IP,
        };
        let (program, arguments) = (program.to_owned(), words.map(str::to_owned).collect());
        let environment = Vec::new();
        match world.guests[0].call(&Command::Run { program, arguments, environment })? {
            Reply::Ran { ok: true, .. } => {}
            other => bail!("{command} was answered with {other:?}"),
        }
    }
    Ok(())
}

/// The uploads with the offload and without, and their judgement.
fn upload_over(
    world: &mut World,
    way: &Way,
    addresses: &mut impl Iterator<Item = Ipv4Addr>,
) -> Result<()> {
    let (mut delivered, mut repeated) = ([Vec::new(), Vec::new()], [0, 0]);
    for upload in 0..way.uploads {
        for offload in [upload % 2 == 1, upload % 2 == 0] {
            let address = addresses.next().context("too few addresses behind the guest")?;
            world.daemon()?.set_offload(&guest_name(0), offload)?;
            until_near(world, address)?;
            run(world, way.around[0])?;
            let before = world.daemon()?.vm_counter("early_acked_bytes")?;
            let outcome = upload_to(world, address, way.bytes, upload as u64)?;
            let early = world.daemon()?.vm_counter("early_acked_bytes")? - before;
            run(world, way.around[1])?;
            let least = if offload { way.early } else { 0 };
            ensure!(early >= least, "{early} bytes were acknowledged early, and not {least}");
            ensure!(offload || early == 0, "{early} bytes acknowledged early without the offload");
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
         and {} segments",
        way.name, repeated[1], repeated[0]
    );
    ensure!(
        with.as_micros() * 100 <= without.as_micros() * PERCENT_MAX,
        "delivered in {with:?} with the offload, in {without:?} without"
    );
    Ok(())
}

/// Connects to the container until it has answered as quickly as one that is near: the quickest of
/// a server's last answers counts (FWD-01). What R sees of it is longer than what the host sees.
fn until_near(world: &World, address: Ipv4Addr) -> Result<()> {
    for _ in 0..ANSWERS {
        if upload_to(world, address, Header::LEN, 0)?.connect < NEAR {
            return Ok(());
        }
    }
    bail!("none of {ANSWERS} answers took less than {NEAR:?}: the machine is too busy")
}

fn upload_to(world: &World, address: Ipv4Addr, bytes: usize, seed: u64) -> Result<Outcome> {
    let upload = Upload::new(bytes, seed);
    let outcome = world.remote().enter(|| upload.send(address, LIMIT)).context("upload")?;
    ensure!(outcome.hash_ok, "the container read something else than was sent");
    Ok(outcome)
}
