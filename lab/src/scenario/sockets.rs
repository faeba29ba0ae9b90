//! Two guests of one host with socket devices, and programs under the virtual TOE in them.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};
use nightporter_guest::data::Source;
use nightporter_guest::peer::{Answer, Ask};
use serde_json::Value;

use super::{LIMIT, MB};
use crate::image::{TOE_LAUNCHER, TOE_SUITE};
use crate::peer::Sockets::{self, Native, Toe};
use crate::vmm::Guest;
use crate::world::{Net, World, address, guest_name};

/// Bytes of a large transfer.
const LARGE: usize = 10 * MB;
/// The most that a guest may be given beyond the bytes that it has read, and half of that.
const WINDOW: u64 = 1 << 20;
const HALF_A_WINDOW: u64 = WINDOW / 2;
/// The guest that connects, and the one that listens.
const CLIENT: usize = 0;
const SERVER: usize = 1;

/// One after the other, since booting takes longer than all of it.
pub(super) fn run(world: &mut World) -> Result<()> {
    for guest in &mut world.guests {
        guest.start_peer(Toe, true)?;
        guest.start_peer(Native, false)?;
    }
    streams_both_ways(world).context("streams both ways")?;
    half_closed(world).context("a connection that is half closed")?;
    unevenly(world).context("reads and writes of all sizes")?;
    not_read(world).context("a receiver that does not read")?;
    many(world).context("many connections")?;
    falls_back(world).context("falling back to TCP")?;
    one_queue(world).context("one queue for those who come by TOE and by TCP")?;
    guest_killed(world).context("a guest that is killed")
}

/// An address of the guest that listens.
fn at(port: u16) -> SocketAddr {
    (address(1, Net::Nightporter), port).into()
}

fn address_of(guest: &mut Guest, sockets: Sockets, ask: Ask) -> Result<SocketAddr> {
    match guest.ask_peer(sockets, ask)? {
        Answer::At { address } => Ok(address),
        other => bail!("{ask:?} was answered with {other:?}"),
    }
}

fn done(told: Answer) -> Result<()> {
    match told {
        Answer::Done { .. } => Ok(()),
        other => bail!("it ended with {other:?}"),
    }
}

fn checked(guest: &mut Guest, sockets: Sockets, seed: u64) -> Result<()> {
    match guest.ask_peer(sockets, Ask::Check { seed })? {
        Answer::Checked { whole: true } => Ok(()),
        other => bail!("what was read is not what was sent: {other:?}"),
    }
}

/// Both do something at the same time.
fn together(world: &mut World, sockets: [Sockets; 2], asks: [Ask; 2]) -> Result<()> {
    for guest in [SERVER, CLIENT] {
        world.guests[guest].tell_peer(sockets[guest], asks[guest])?;
    }
    for guest in [CLIENT, SERVER] {
        let told = world.guests[guest].hear_peer()?;
        done(told).with_context(|| format!("{:?}", asks[guest]))?;
    }
    Ok(())
}

/// Connects both; the end that accepts sees the other's address.
fn connected(world: &mut World, sockets: [Sockets; 2], port: u16) -> Result<()> {
    let listen = Ask::Listen { at: at(port) };
    address_of(&mut world.guests[SERVER], sockets[SERVER], listen)?;
    let connect = Ask::Connect { to: at(port) };
    let own = address_of(&mut world.guests[CLIENT], sockets[CLIENT], connect)?;
    let from = address_of(&mut world.guests[SERVER], sockets[SERVER], Ask::Accept)?;
    ensure!(own == from, "{own} has connected, {from} was accepted");
    ensure!(own.ip() == address(0, Net::Nightporter), "the client is {own}");
    Ok(())
}

/// Bytes that guests were given over their socket devices.
fn given(world: &mut World) -> Result<[u64; 2]> {
    let daemon = world.daemon()?;
    let mut of = |guest| daemon.toe_bytes_to_guest(&guest_name(guest));
    Ok([of(0)?, of(1)?])
}

fn streams_both_ways(world: &mut World) -> Result<()> {
    connected(world, [Toe, Toe], 7000)?;
    let before = given(world)?;
    let exchange = |seed, second| Ask::Exchange { bytes: LARGE, seed, second };
    together(world, [Toe, Toe], [exchange(1, false), exchange(2, true)])?;
    checked(&mut world.guests[SERVER], Toe, 1)?;
    checked(&mut world.guests[CLIENT], Toe, 2)?;
    let after = given(world)?;
    for guest in [CLIENT, SERVER] {
        let given = after[guest] - before[guest];
        ensure!(given >= LARGE as u64, "only {given} bytes went by TOE to guest {guest}");
    }
    Ok(())
}

/// One finishes its stream, and the other goes on.
fn half_closed(world: &mut World) -> Result<()> {
    connected(world, [Toe, Toe], 7001)?;
    let [client, server] = &mut world.guests[..] else { bail!("two guests") };
    done(client.ask_peer(Toe, Ask::Send { bytes: 5, seed: 3, answered: false })?)?;
    done(client.ask_peer(Toe, Ask::Finish)?)?;
    ensure!(server.ask_peer(Toe, Ask::ReadToEnd)? == Answer::Ended { bytes: 5 });
    checked(server, Toe, 3)?;
    let asks = [
        Ask::Receive { bytes: LARGE, answered: false },
        Ask::Send { bytes: LARGE, seed: 4, answered: false },
    ];
    together(world, [Toe, Toe], asks)?;
    checked(&mut world.guests[CLIENT], Toe, 4)?;
    done(world.guests[SERVER].ask_peer(Toe, Ask::Close)?)?;
    let end = world.guests[CLIENT].ask_peer(Toe, Ask::ReadToEnd)?;
    ensure!(end == Answer::Ended { bytes: 0 }, "it ended with {end:?}");
    Ok(())
}

fn unevenly(world: &mut World) -> Result<()> {
    connected(world, [Toe, Toe], 7004)?;
    let exchange = |seed| Ask::ExchangeUnevenly { bytes: LARGE, seed };
    together(world, [Toe, Toe], [exchange(10), exchange(11)])?;
    checked(&mut world.guests[SERVER], Toe, 10)?;
    checked(&mut world.guests[CLIENT], Toe, 11)
}

/// One does not read: the sender waits, the host keeps no more than a window, and nothing is lost.
fn not_read(world: &mut World) -> Result<()> {
    connected(world, [Toe, Toe], 7005)?;
    let before = given(world)?[SERVER];
    let send = Ask::Send { bytes: LARGE, seed: 12, answered: true };
    world.guests[CLIENT].tell_peer(Toe, send)?;
    let deadline = Instant::now() + LIMIT;
    while given(world)?[SERVER] - before < HALF_A_WINDOW {
        ensure!(Instant::now() < deadline, "only {} bytes came", given(world)?[SERVER] - before);
    }
    let came = given(world)?[SERVER] - before;
    ensure!(came <= WINDOW, "{came} bytes came that nobody reads");
    let status = world.daemon()?.cli(&["--json", "status"])?;
    let status: Value = serde_json::from_str(&status)?;
    for port in status["ports"].as_array().context("a list")? {
        let kept = &port["vm"]["toe"]["kept_bytes"];
        ensure!(kept.as_u64().unwrap_or(0) <= WINDOW, "the host keeps {kept} bytes");
    }
    world.guests[SERVER].tell_peer(Toe, Ask::Receive { bytes: LARGE, answered: true })?;
    for guest in [CLIENT, SERVER] {
        done(world.guests[guest].hear_peer()?)?;
    }
    checked(&mut world.guests[SERVER], Toe, 12)
}

fn many(world: &mut World) -> Result<()> {
    address_of(&mut world.guests[SERVER], Toe, Ask::Listen { at: at(7006) })?;
    let (to, count) = (at(7006), 500);
    together(world, [Toe, Toe], [Ask::Connects { to, count }, Ask::Accepts { count }])
}

/// If there is no listener by TOE, TCP decides, and the program sees TCP's answer alone.
fn falls_back(world: &mut World) -> Result<()> {
    let before = given(world)?;
    match world.guests[CLIENT].ask_peer(Toe, Ask::Connect { to: at(7998) })? {
        Answer::Failed { errno: libc::ECONNREFUSED, .. } => {}
        other => bail!("where nobody listens connect() gave {other:?}"),
    }
    connected(world, [Toe, Native], 7999)?;
    let bytes = MB;
    let receive = Ask::Receive { bytes, answered: true };
    together(world, [Toe, Native], [Ask::Send { bytes, seed: 5, answered: true }, receive])?;
    checked(&mut world.guests[SERVER], Native, 5)?;
    ensure!(given(world)? == before, "bytes went by TOE to who listens by TCP only");
    Ok(())
}

/// A listener takes clients by TOE, by TCP from the same guest, and by TCP from another machine,
/// all of which have come before it takes one.
fn one_queue(world: &mut World) -> Result<()> {
    let listen = Ask::Listen { at: at(7002) };
    address_of(&mut world.guests[SERVER], Toe, listen)?;
    let mut coming = BTreeMap::new();
    for (sockets, seed) in [(Toe, 6), (Native, 7)] {
        let client = &mut world.guests[CLIENT];
        let own = address_of(client, sockets, Ask::Connect { to: at(7002) })?;
        done(client.ask_peer(sockets, Ask::Send { bytes: 5, seed, answered: false })?)?;
        coming.insert(own, seed);
    }
    let (mut source, seed) = (Source::new(), 8);
    source.reach(seed, 5);
    let mut remote = world.remote().enter(|| TcpStream::connect(at(7002)))?;
    remote.write_all(source.piece(seed, 5))?;
    coming.insert(remote.local_addr()?, seed);
    let server = &mut world.guests[SERVER];
    while !coming.is_empty() {
        let from = address_of(server, Toe, Ask::Accept)?;
        let seed = coming.remove(&from).with_context(|| format!("{from} has not connected"))?;
        done(server.ask_peer(Toe, Ask::Receive { bytes: 5, answered: false })?)?;
        checked(server, Toe, seed)?;
    }
    Ok(())
}

/// The suite prints the same of TCP, under the library and under the launcher, line by line. It
/// connects to its own guest, which this world leads over the host.
pub(super) fn suite(world: &mut World) -> Result<()> {
    let words = [address(0, Net::Nightporter).to_string(), "10.99.7.7".to_owned()];
    let native = printed(world, TOE_SUITE, &words, Native)?;
    ensure!(native.lines().count() > 100, "the suite printed {native:?}");
    let before = given(world)?;
    let by_library = printed(world, TOE_SUITE, &words, Toe)?;
    let between = given(world)?;
    ensure!(between[0] - before[0] > LARGE as u64, "the suite's bytes did not go by TOE");
    same(&native, &by_library).context("under the library")?;
    let launched = [["run", "--", TOE_SUITE].map(str::to_owned).to_vec(), words.to_vec()].concat();
    let by_launcher = printed(world, TOE_LAUNCHER, &launched, Native)?;
    let after = given(world)?;
    ensure!(after[0] - between[0] > LARGE as u64, "the launched suite's bytes did not go by TOE");
    same(&native, &by_launcher).context("under the launcher")
}

fn printed(
    world: &mut World,
    program: &str,
    arguments: &[String],
    sockets: Sockets,
) -> Result<String> {
    let environment = sockets.environment(false);
    let (file, arguments) = (program.to_owned(), arguments.to_vec());
    let begun = Instant::now();
    let ran = world.guests[0].call(&Command::Run { program: file, arguments, environment })?;
    println!("{program} took {:.1} s, {sockets:?}", begun.elapsed().as_secs_f64());
    match ran {
        Reply::Ran { ok: true, output } => Ok(output),
        Reply::Ran { ok: false, output } => bail!("the suite failed: {output}"),
        other => bail!("run was answered with {other:?}"),
    }
}

fn same(native: &str, toe: &str) -> Result<()> {
    let (lines, others): (Vec<&str>, Vec<&str>) = (native.lines().collect(), toe.lines().collect());
    let differ = lines.iter().zip(&others).filter(|(native, toe)| native != toe);
    let differ: Vec<_> = differ.collect();
    ensure!(differ.is_empty(), "native and by TOE: {differ:#?}");
    ensure!(lines.len() == others.len(), "{} and {} lines", lines.len(), others.len());
    Ok(())
}

/// The streams of a killed guest do not end clean.
fn guest_killed(world: &mut World) -> Result<()> {
    connected(world, [Toe, Toe], 7003)?;
    let receive = Ask::Receive { bytes: 5, answered: true };
    together(world, [Toe, Toe], [Ask::Send { bytes: 5, seed: 9, answered: true }, receive])?;
    world.guests[CLIENT].tell_peer(Toe, Ask::ReadToEnd)?;
    world.guests.remove(SERVER).kill();
    match world.guests[CLIENT].hear_peer()? {
        Answer::Failed { errno: libc::ECONNRESET, .. } => Ok(()),
        other => bail!("who was reading got {other:?}"),
    }
}
