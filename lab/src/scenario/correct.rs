//! Properties of a stream over hosts, between guests of one host and of two: every byte arrives,
//! memory is bounded, and a stream with losses does not end clean.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::peer::{Answer, Ask};
use nix::sys::signal::Signal;

use super::{LIMIT, MB};
use crate::host::ip;
use crate::hosts::{HOST_OF, Hosts, nic};
use crate::image::log_dir;
use crate::peer::Sockets::Toe;
use crate::process::run as run_tool;
use crate::vmm::Vmm;

/// Clients and servers: on the same host, and on another.
const CLIENT: usize = 0;
const SERVERS: [usize; 2] = [1, 2];
/// No answer takes longer: the slowest is that of 100,000 connections on a busy machine.
const PATIENCE: Duration = Duration::from_secs(3600);
/// The further memory of their own that daemons may use while much data waits to be read.
const GROWTH_MAX: u64 = 16 << 20;

/// How much, and how long.
struct Sizes {
    /// Bytes that both write before either reads.
    unread: usize,
    connections: usize,
    /// For how long a receiver stops.
    pause: Duration,
}

const SHORT: Sizes = Sizes { unread: 64 * MB, connections: 500, pause: Duration::from_secs(3) };
const LONG: Sizes =
    Sizes { unread: 1000 * MB, connections: 100_000, pause: Duration::from_secs(60) };

pub(super) fn short(hosts: &mut Hosts) -> Result<()> {
    run(hosts, &SHORT)
}

pub(super) fn long(hosts: &mut Hosts) -> Result<()> {
    run(hosts, &LONG)
}

type Case = fn(&mut Between<'_>, &Sizes) -> Result<()>;

fn run(hosts: &mut Hosts, sizes: &Sizes) -> Result<()> {
    let cases: [(&str, Case); 6] = [
        ("reads and writes of all sizes", |it, _| it.unevenly()),
        ("half-close", |it, _| it.half_closed()),
        ("much is written before anything is read", |it, sizes| it.unread(sizes)),
        ("a program that stops reading", |it, sizes| it.program_stops(sizes)),
        ("a guest that stops", |it, sizes| it.guest_stops(sizes)),
        ("connects and closes", |it, sizes| it.many(sizes)),
    ];
    start_peers(hosts)?;
    for server in SERVERS {
        for (port, (name, case)) in (7000..).zip(cases) {
            let begun = Instant::now();
            let at = if HOST_OF[server] == HOST_OF[CLIENT] { "one host" } else { "two hosts" };
            let mut between = Between { hosts, server, port };
            case(&mut between, sizes).with_context(|| format!("{name}, {at}"))?;
            println!("{name}, {at}: {:.1} s", begun.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

fn start_peers(hosts: &mut Hosts) -> Result<()> {
    hosts.guests.iter_mut().try_for_each(|guest| guest.start_peer(Toe, false))
}

/// Two guests, and the port at which the second listens.
struct Between<'a> {
    hosts: &'a mut Hosts,
    server: usize,
    port: u16,
}

impl Between<'_> {
    fn at(&self) -> SocketAddr {
        (nic(self.server).address, self.port).into()
    }

    fn tell(&mut self, guest: usize, ask: Ask) -> Result<()> {
        self.hosts.guests[guest].tell_peer(Toe, ask)
    }

    fn hear(&mut self, guest: usize) -> Result<Answer> {
        self.hosts.guests[guest].hear_peer_within(PATIENCE)
    }

    fn ask(&mut self, guest: usize, ask: Ask) -> Result<Answer> {
        self.tell(guest, ask)?;
        self.hear(guest)
    }

    fn done(&mut self, guest: usize, ask: Ask) -> Result<()> {
        match self.ask(guest, ask)? {
            Answer::Done { .. } | Answer::At { .. } => Ok(()),
            other => bail!("{ask:?} was answered with {other:?}"),
        }
    }

    /// Both execute a command at the same time; returns their answers.
    fn together(&mut self, asks: [Ask; 2]) -> Result<[Answer; 2]> {
        let server = self.server;
        self.tell(server, asks[1])?;
        self.tell(CLIENT, asks[0])?;
        Ok([self.hear(CLIENT)?, self.hear(server)?])
    }

    fn whole(told: [Answer; 2]) -> Result<()> {
        let whole = Answer::Checked { whole: true };
        ensure!(told == [whole.clone(), whole], "they were told {told:?}");
        Ok(())
    }

    fn connected(&mut self) -> Result<()> {
        let (at, server) = (self.at(), self.server);
        self.done(server, Ask::Listen { at })?;
        self.done(CLIENT, Ask::Connect { to: at })?;
        self.done(server, Ask::Accept)
    }

    fn given(&mut self) -> Result<[u64; 2]> {
        Ok([self.hosts.given(CLIENT)?, self.hosts.given(self.server)?])
    }

    fn unevenly(&mut self) -> Result<()> {
        self.connected()?;
        let (server, bytes) = (self.server, 10 * MB);
        let before = self.given()?;
        let told = self.together([21, 22].map(|seed| Ask::ExchangeUnevenly { bytes, seed }))?;
        ensure!(told.iter().all(|told| matches!(told, Answer::Done { .. })), "{told:?}");
        let client = self.ask(CLIENT, Ask::Check { seed: 22 })?;
        Self::whole([client, self.ask(server, Ask::Check { seed: 21 })?])?;
        let after = self.given()?;
        let went = (0..2).all(|end| after[end] - before[end] >= bytes as u64);
        ensure!(went, "only {after:?} bytes went by TOE, {before:?} before");
        Ok(())
    }

    fn half_closed(&mut self) -> Result<()> {
        self.connected()?;
        let (server, bytes) = (self.server, 10 * MB);
        self.done(CLIENT, Ask::Send { bytes: 5, seed: 3, answered: false })?;
        self.done(CLIENT, Ask::Finish)?;
        ensure!(self.ask(server, Ask::ReadToEnd)? == Answer::Ended { bytes: 5 });
        let (receive, send) = (
            Ask::Receive { bytes, answered: false },
            Ask::Send { bytes, seed: 4, answered: false },
        );
        let told = self.together([receive, send])?;
        ensure!(told.iter().all(|told| matches!(told, Answer::Done { .. })), "{told:?}");
        let client = self.ask(CLIENT, Ask::Check { seed: 4 })?;
        Self::whole([client, self.ask(server, Ask::Check { seed: 3 })?])?;
        self.done(server, Ask::Close)?;
        let end = self.ask(CLIENT, Ask::ReadToEnd)?;
        ensure!(end == Answer::Ended { bytes: 0 }, "it ended with {end:?}");
        self.done(CLIENT, Ask::Close)
    }

    fn poured(&mut self, guest: usize) -> Result<usize> {
        match self.ask(guest, Ask::Poured)? {
            Answer::Poured { bytes } => Ok(bytes),
            other => bail!("who pours said {other:?}"),
        }
    }

    /// Both write, until no more has a place for a second: how much that is.
    fn fill(&mut self, bytes: usize) -> Result<[usize; 2]> {
        let server = self.server;
        for (guest, seed) in [(CLIENT, 31), (server, 32)] {
            self.done(guest, Ask::Pour { bytes, seed })?;
        }
        let deadline = Instant::now() + LIMIT;
        let (mut last, mut since) = ([0; 2], Instant::now());
        while last.contains(&0) || since.elapsed() < Duration::from_secs(1) {
            ensure!(Instant::now() < deadline, "{last:?} bytes were written, and it goes on");
            let now = [self.poured(CLIENT)?, self.poured(server)?];
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        Ok(last)
    }

    fn drained(&mut self, bytes: usize) -> Result<()> {
        let told = self.together([32, 31].map(|seed| Ask::Drain { bytes, seed }))?;
        Self::whole(told)
    }

    /// Bytes of memory of its own that each daemon has.
    fn memory(&mut self) -> Result<[u64; 2]> {
        let [first, second] = &self.hosts.daemons[..] else { bail!("two hosts") };
        Ok([first.memory()?, second.memory()?])
    }

    fn unread(&mut self, sizes: &Sizes) -> Result<()> {
        self.connected()?;
        let before = self.memory()?;
        let written = self.fill(sizes.unread)?;
        let after = self.memory()?;
        ensure!(written.iter().all(|bytes| *bytes < sizes.unread), "all has a place: {written:?}");
        let grown = [0, 1].map(|at| after[at].saturating_sub(before[at]));
        ensure!(grown.iter().all(|bytes| *bytes < GROWTH_MAX), "daemons have {grown:?} more");
        println!("  written {written:?} bytes, daemons have {grown:?} bytes more");
        self.drained(sizes.unread)
    }

    fn many(&mut self, sizes: &Sizes) -> Result<()> {
        let (at, server, count) = (self.at(), self.server, sizes.connections);
        self.done(server, Ask::Listen { at })?;
        let before = self.given()?;
        let told = self.together([Ask::Connects { to: at, count }, Ask::Accepts { count }])?;
        ensure!(told.iter().all(|told| matches!(told, Answer::Done { .. })), "{told:?}");
        let after = self.given()?;
        ensure!(after[1] - before[1] >= count as u64, "{before:?}, {after:?} went by TOE");
        let Answer::Done { ns } = told[0] else { bail!("told {told:?}") };
        println!("  {:.0} us for each", ns as f64 / 1e3 / count as f64);
        Ok(())
    }

    /// Nothing is lost meanwhile, and there are no commands.
    fn pass(&mut self, time: Duration) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            for daemon in &mut self.hosts.daemons {
                daemon.check_alive()?;
            }
            thread::sleep(Duration::from_millis(100)); // the time is what is tested
        }
        Ok(())
    }

    fn program_stops(&mut self, sizes: &Sizes) -> Result<()> {
        self.connected()?;
        let bytes = 20 * MB;
        let written = self.fill(bytes)?;
        self.pass(sizes.pause)?;
        ensure!(written == [self.poured(CLIENT)?, self.poured(self.server)?], "somebody read");
        self.drained(bytes)
    }

    fn guest_stops(&mut self, sizes: &Sizes) -> Result<()> {
        self.connected()?;
        let (server, bytes) = (self.server, 200 * MB);
        self.done(CLIENT, Ask::Pour { bytes, seed: 41 })?;
        self.tell(server, Ask::Drain { bytes, seed: 41 })?;
        self.until_given(10 * MB as u64)?;
        self.hosts.guests[server].signal(Signal::SIGSTOP)?;
        self.pass(sizes.pause)?;
        let stood = self.given()?[1];
        self.hosts.guests[server].signal(Signal::SIGCONT)?;
        let told = self.hear(server)?;
        ensure!(told == Answer::Checked { whole: true }, "it was told {told:?}");
        ensure!(self.given()?[1] > stood, "all was there before it stopped");
        Ok(())
    }

    /// Waits until the server was given so many bytes more.
    fn until_given(&mut self, bytes: u64) -> Result<()> {
        let before = self.given()?[1];
        let deadline = Instant::now() + LIMIT;
        while self.given()?[1] < before + bytes {
            ensure!(Instant::now() < deadline, "{:?} bytes came", self.given()?);
        }
        Ok(())
    }

    /// Somebody dies in the middle of a transfer both ways: these hear of a reset.
    fn dies(&mut self, death: Death, survivors: &[usize]) -> Result<()> {
        self.connected()?;
        let (server, bytes) = (self.server, 100_000 * MB);
        for (guest, seed) in [(CLIENT, 51), (server, 52)] {
            self.done(guest, Ask::Pour { bytes, seed })?;
        }
        for (guest, seed) in [(CLIENT, 52), (server, 51)] {
            self.tell(guest, Ask::Drain { bytes, seed })?;
        }
        self.until_given(10 * MB as u64)?;
        death(self.hosts, server)?;
        for &guest in survivors {
            let told = self.hear(guest)?;
            let reset = matches!(told, Answer::Failed { errno: libc::ECONNRESET, .. });
            ensure!(reset, "guest {guest} was told {told:?}");
        }
        Ok(())
    }
}

/// The fate of a guest's host, or of the guest.
type Death = fn(&mut Hosts, usize) -> Result<()>;

/// One dies after the other.
pub(super) fn killed(hosts: &mut Hosts) -> Result<()> {
    start_peers(hosts)?;
    let [local, remote] = SERVERS;
    // QEMU 7.2 does not connect this device to the next daemon, so nobody can tell its guest.
    let hears_of_its_daemon = hosts.guests[remote].vmm() == Vmm::Uml;
    let of_a_daemon = if hears_of_its_daemon { &[CLIENT, remote][..] } else { &[CLIENT] };
    let cases: [(&str, usize, Death, &[usize]); 3] = [
        ("the fabric", remote, cut_streams, &[CLIENT, remote]),
        ("a guest of the same host", local, kill_guest, &[CLIENT]),
        ("a daemon", remote, kill_daemon, of_a_daemon),
    ];
    for (port, (what, server, death, survivors)) in (7100..).zip(cases) {
        let begun = Instant::now();
        let outcome = Between { hosts, server, port }.dies(death, survivors);
        outcome.with_context(|| format!("killed: {what}"))?;
        println!("killed: {what}: {:.1} s", begun.elapsed().as_secs_f64());
        if server == remote && port == 7100 {
            // And the next one is well.
            Between { hosts, server, port: 7200 }.unevenly().context("after that")?;
        }
    }
    Ok(())
}

/// The host of the remote guest is gone, silently.
pub(super) fn vanished(hosts: &mut Hosts) -> Result<()> {
    start_peers(hosts)?;
    let (server, begun) = (SERVERS[1], Instant::now());
    Between { hosts, server, port: 7300 }.dies(cut_cable, &[CLIENT, server])?;
    println!("noticed after {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}

/// Ends all streams between the hosts, as a firewall would that resets them.
fn cut_streams(hosts: &mut Hosts, _: usize) -> Result<()> {
    let ends = ["-K", "-t", "-n", "-H", "sport", "=", ":4793", "or", "dport", "=", ":4793"];
    let cut = hosts.machines[0].enter(|| run_tool("ss", &ends))?;
    ensure!(!cut.is_empty(), "no stream was cut; has this kernel INET_DIAG_DESTROY?");
    Ok(())
}

fn cut_cable(hosts: &mut Hosts, _: usize) -> Result<()> {
    hosts.machines[0].enter(|| ip("link set cable down"))
}

fn kill_guest(hosts: &mut Hosts, server: usize) -> Result<()> {
    hosts.guests[server].die();
    Ok(())
}

fn kill_daemon(hosts: &mut Hosts, server: usize) -> Result<()> {
    let log = log_dir("killed")?.join("second.log");
    hosts.daemon_of(server).crash(&log)
}
