//! The link between the remote host and the bridge: a delay line between two taps.
//!
//! ```text
//!   remote namespace                                     host namespace
//!   eth0 (tap) ══ read ── wire: rate, delay ── write ══ remote (tap) ── bridge
//! ```
//!
//! A thread moves frames from one tap to the other and back. Each direction is a [`Wire`]: a frame
//! takes its time on it (its bits over the rate), one frame after the other, and arrives one delay
//! later. Super-segments stay whole, as between two virtual machines, but take as long as their
//! segments would. The buffer before the wire is deep: a sender's whole window fits, so the line
//! loses nothing and what a run measures is delay, not luck. A [`Shape`] may say otherwise.
//!
//! The thread is SCHED_FIFO, because a wire does not wait for a core. Timers and wake-ups still add
//! to its delay, on a virtual machine 0.1 ms or more. [`DelayLine::calibrate`] subtracts that from
//! the delay, and measures the link through both kernels' stacks before it is used.

use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::TimeSpec;
use serde::Serialize;

use crate::host::Remote;
use crate::sys;
pub use lateness::Late;
use watch::Watch;
use wire::Wire;

mod harm;
mod lateness;
pub mod watch;
mod wire;

/// The link between the remote host and the guests' host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// A data centre: 10 Gbit/s, 0.1 ms round trip.
    Lan,
    /// The vSnoop paper's machine room: 1 Gbit/s, 0.1 ms.
    Gigabit,
    /// A city: 1 Gbit/s, 10 ms.
    Metro,
    /// A continent: 100 Mbit/s, 40 ms.
    Wan,
    /// The network of the study of VM effects: 100 Mbit/s, 0.1 ms.
    Hundred,
}

impl Link {
    /// A line that loses nothing.
    #[must_use]
    pub fn shape(self) -> Shape {
        let (rate, round_trip) = (self.rate(), self.round_trip());
        Shape { rate, round_trip, ..Shape::GOOD }
    }

    /// Bits per second.
    #[must_use]
    pub fn rate(self) -> u64 {
        match self {
            Self::Lan => 10_000_000_000,
            Self::Gigabit | Self::Metro => 1_000_000_000,
            Self::Wan | Self::Hundred => 100_000_000,
        }
    }

    /// There and back.
    #[must_use]
    pub fn round_trip(self) -> Duration {
        match self {
            Self::Lan | Self::Gigabit | Self::Hundred => Duration::from_micros(100),
            Self::Metro => Duration::from_millis(10),
            Self::Wan => Duration::from_millis(40),
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().expect("no value is skipped").get_name())
    }
}

/// The behaviour of a line.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Shape {
    /// Bits per second, each way.
    pub rate: u64,
    /// There and back, without queues.
    pub round_trip: Duration,
    /// How long a frame to the remote may have to wait for the wire: one that would have to wait
    /// longer is lost. `None`: as deep a buffer as there has to be.
    pub queue: Option<Duration>,
    /// The share of the frames with data to the remote that is lost by chance.
    pub loss: f64,
    /// The share of those that is marked by chance, if they are ECN-capable.
    pub marks: f64,
    /// Bytes of the longest IP packet that gets to the remote. A router refuses longer ones, and
    /// reports it.
    pub mtu: u16,
    /// The further delay of frames to [`crate::host::FAR`], behind the queue.
    pub far: Duration,
    /// Super-segments to the remote are cut before they meet the queue, and connections are
    /// watched ([`watch`]).
    pub by_frame: bool,
    /// Measurements use it: its behaviour is verified, or it is an error.
    pub exact: bool,
}

impl Shape {
    /// One that loses nothing, of no rate.
    pub(crate) const GOOD: Self = Self {
        rate: 0,
        round_trip: Duration::ZERO,
        queue: None,
        loss: 0.0,
        marks: 0.0,
        mtu: u16::MAX,
        far: Duration::ZERO,
        by_frame: false,
        exact: true,
    };

    /// A path that does data to the remote all the harm that a path may do: 200 Mbit/s and 5 ms.
    pub const BAD: Self = Self {
        rate: 200_000_000,
        round_trip: Duration::from_millis(5),
        loss: 0.003,
        marks: 0.01,
        mtu: 1400,
        by_frame: true,
        exact: false,
        ..Self::GOOD
    };
}

/// A super-segment of 64 KiB with its headers, and then some.
const FRAME_BYTES_MAX: usize = 68 * 1024;
/// Frames taken from one tap before the other has its turn.
const FRAMES_PER_TURN: usize = 64;
/// A packet is handed over up to so much early: no timer is worth setting for less.
const TIMER_NS: u64 = 20_000;
/// A round trip that is shorter is delayed on one way only.
const SHORT_NS: u64 = 1_000_000;
/// Above everything else that the lab starts.
const PRIORITY: i32 = 50;

/// A running line. It ends when this is dropped.
#[derive(Debug)]
pub struct DelayLine {
    shape: Shape,
    watch: Arc<Mutex<Watch>>,
    /// There and back, ns: the part that the machine does not add.
    delay: Arc<AtomicU64>,
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl DelayLine {
    /// Connects two taps, whose packets carry virtio-net headers.
    ///
    /// # Errors
    /// No descriptors.
    pub fn start(shape: Shape, taps: [File; 2]) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let delay = Arc::new(AtomicU64::new(nanos(shape.round_trip)));
        let watch = Arc::new(Mutex::new(Watch::default()));
        let shared = (Arc::clone(&delay), Arc::clone(&watch));
        let thread = thread::spawn(move || {
            // Without the right to it the line is late at times, which `calibrate` shows.
            let _ = sys::set_fifo(0, PRIORITY);
            if let Err(error) = carry(shape, &shared.0, &shared.1, taps, &theirs) {
                eprintln!("the delay line ended: {error:#}");
            }
        });
        Ok(Self { shape, watch, delay, stop: Some(ours), thread: Some(thread) })
    }

    /// Its view of connections, if its shape is by frame.
    #[must_use]
    pub fn watch(&self) -> &Mutex<Watch> {
        &self.watch
    }

    /// Takes what the machine adds off the delay, then measures the link from `remote` to `host`,
    /// an address of the calling thread's namespace.
    ///
    /// # Errors
    /// It is not what its name says: see [`judge`].
    pub fn calibrate(&self, remote: &Remote, host: Ipv4Addr) -> Result<Measured> {
        let mut tries = 0;
        loop {
            tries += 1;
            self.shorten(remote, host)?;
            let found = Measured {
                round_trip_ms: ping(remote, host, PINGS)?.as_secs_f64() * 1e3,
                rate_mbit_s: throughput(self.shape.rate, remote, host)? / PAYLOAD_SHARE / 1e6,
            };
            match judge(self.shape, found) {
                Err(_) if tries < TRIES => {}
                result => return result.map(|()| found),
            }
        }
    }

    /// Finds the shortest delay with which the round trip is not too short, by bisection: the
    /// machine's own share jumps where a timer becomes worth setting.
    fn shorten(&self, remote: &Remote, host: Ipv4Addr) -> Result<()> {
        let nominal = self.shape.round_trip;
        let mut enough = nanos(nominal);
        let mut short = enough.saturating_sub(SHORTER_MAX_NS);
        for _ in 0..BISECTIONS {
            let middle = u64::midpoint(short, enough);
            self.delay.store(middle, Ordering::Relaxed);
            match ping(remote, host, PINGS / 4)? < nominal {
                true => short = middle,
                false => enough = middle,
            }
        }
        self.delay.store(enough, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for DelayLine {
    fn drop(&mut self) {
        self.stop = None; // the other end hangs up
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Moves frames until `stop` hangs up.
fn carry(
    shape: Shape,
    delay: &AtomicU64,
    watch: &Mutex<Watch>,
    mut taps: [File; 2],
    stop: &UnixStream,
) -> Result<()> {
    let start = Instant::now();
    let now = || nanos(start.elapsed());
    let mut wires = [Wire::from_remote(shape), Wire::to_remote(shape)];
    let mut packet = vec![0; FRAME_BYTES_MAX];
    loop {
        let due = wires.iter().filter_map(Wire::due).min();
        let wait =
            due.map(|at| TimeSpec::from_duration(Duration::from_nanos(at.saturating_sub(now()))));
        let mut fds = [wants(taps[0].as_fd()), wants(taps[1].as_fd()), wants(stop.as_fd())];
        ppoll(&mut fds, wait, None)?;
        let ready = fds.map(|fd| fd.any().unwrap_or(true));
        if ready[2] {
            return Ok(());
        }
        for from in 0..2 {
            if ready[from] {
                let round_trip = delay.load(Ordering::Relaxed);
                let mut watch = (shape.by_frame && from == 1).then(|| watch.lock().expect("whole"));
                let watch = watch.as_deref_mut();
                let delays = [from, 1 - from].map(|from| one_way(from, round_trip));
                let [from_remote, to_remote] = &mut wires;
                let ways = match from {
                    0 => [from_remote, to_remote],
                    _ => [to_remote, from_remote],
                };
                take(&mut taps[from], ways, &mut packet, (now(), delays), watch)?;
            }
        }
        for from in 0..2 {
            while let Some(packet) = wires[from].arrived(now() + TIMER_NS) {
                if shape.by_frame && from == 0 {
                    watch.lock().expect("whole").answer_leaves(&packet);
                }
                // An interface that is down, or whose queue is full, loses it as a wire would.
                let _ = taps[1 - from].write_vectored(&[IoSlice::new(&packet)]);
            }
        }
    }
}

/// The delay from a tap to the other: half of the round trip's. One timer is all that fits into a
/// short one: the way to the remote has it.
fn one_way(from: usize, round_trip: u64) -> u64 {
    match (round_trip < SHORT_NS, from) {
        (false, _) => round_trip / 2,
        (true, 0) => 0,
        (true, _) => round_trip,
    }
}

fn wants(fd: BorrowedFd<'_>) -> PollFd<'_> {
    PollFd::new(fd, PollFlags::POLLIN)
}

/// Puts a tap's packets on `wire`, and a router's answers on the way `back`; `delays` are those of
/// both.
fn take(
    tap: &mut File,
    [wire, back]: [&mut Wire; 2],
    packet: &mut [u8],
    (now, delays): (u64, [u64; 2]),
    mut watch: Option<&mut Watch>,
) -> Result<()> {
    if let Some(watch) = &watch {
        wire.late = watch.late;
    }
    for _ in 0..FRAMES_PER_TURN {
        match tap.read(packet) {
            Ok(len) => {
                let packet = &packet[..len];
                let refusal = wire.refusal(packet);
                if let Some(refusal) = &refusal {
                    back.accept(now, delays[1], refusal);
                }
                let waits = match refusal {
                    Some(_) => None,
                    None => wire.accept(now, delays[0], packet),
                };
                if let Some(watch) = &mut watch {
                    watch.data_came(now, packet, waits);
                    watch.harm.refused += u64::from(refusal.is_some());
                    (watch.harm.lost, watch.harm.marked) = (wire.lost, wire.marked);
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => break,
            Err(e) => return Err(e).context("reading from a tap"),
        }
    }
    Ok(())
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("a run is shorter than centuries")
}

/// The measured values of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    /// Median of pings, ms.
    pub round_trip_ms: f64,
    /// 10^6 bits on the wire in one second, headers and gaps included.
    pub rate_mbit_s: f64,
}

/// Pings whose median counts; a quarter of them for a step of a bisection.
const PINGS: usize = 44;
/// The largest correction of the delay, and the number of steps to find it.
const SHORTER_MAX_NS: u64 = 1_000_000;
const BISECTIONS: usize = 6;
const PORT: u16 = 5009;
/// No packet of a measurement takes this long.
const LIMIT: Duration = Duration::from_secs(5);
/// Share of the rate that a full frame's payload is: 1448 of 1538 bytes, with timestamps.
const PAYLOAD_SHARE: f64 = 1448.0 / 1538.0;
/// The most that the stacks, the line's thread and a shared core may add to a round trip, ms.
const ROUND_TRIP_EXTRA: f64 = 0.25;
/// On a busy machine a measurement may be spoilt.
const TRIES: usize = 3;

/// Whether a link is what its name says: the round trip within 5 % and 0.25 ms, the rate within
/// 5 %. Only above 1 Gbit/s may it be slower: there a thread and two stacks on one core are the
/// limit.
fn judge(shape: Shape, found: Measured) -> Result<()> {
    let nominal = shape.round_trip.as_secs_f64() * 1e3;
    let rate = shape.rate as f64 / 1e6;
    let slow = shape.rate <= 1_000_000_000 && found.rate_mbit_s < 0.95 * rate;
    let (early, late) = (0.95 * nominal, 1.05 * nominal + ROUND_TRIP_EXTRA);
    let right = (early..=late).contains(&found.round_trip_ms);
    ensure!(
        right && !slow && found.rate_mbit_s < 1.05 * rate,
        "the link should take {nominal} ms and {rate} Mbit/s; it was found to take \
         {:.3} ms and {:.0} Mbit/s: is the machine busy?",
        found.round_trip_ms,
        found.rate_mbit_s
    );
    Ok(())
}

/// The median of some pings over UDP, after one that makes the hosts know each other.
fn ping(remote: &Remote, host: Ipv4Addr, pings: usize) -> Result<Duration> {
    let echo = UdpSocket::bind((host, PORT))?;
    echo.set_read_timeout(Some(LIMIT))?;
    thread::scope(|scope| {
        let answering = scope.spawn(move || -> Result<()> {
            let mut byte = [0; 64];
            for _ in 0..=pings {
                let (len, from) = echo.recv_from(&mut byte).context("waiting for a ping")?;
                echo.send_to(&byte[..len], from)?;
            }
            Ok(())
        });
        let times = remote.enter(|| -> Result<Vec<Duration>> {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.set_read_timeout(Some(LIMIT))?;
            socket.connect((host, PORT))?;
            let one = |_| -> Result<Duration> {
                let sent = Instant::now();
                socket.send(b"ping")?;
                socket.recv(&mut [0; 64]).context("a ping was not answered")?;
                Ok(sent.elapsed())
            };
            (0..=pings).map(one).collect()
        });
        answering.join().expect("does not panic")?;
        let mut times = times?.split_off(1);
        times.sort();
        Ok(times[pings / 2])
    })
}

/// Bits per second of TCP payload, in the second half of a transfer of half a second, or of 64 MB.
/// The line shares a core with the sender, so it may be late in the first half and catch up in the
/// second. If the second half was faster than the line, the result is the rate of the whole.
fn throughput(rate: u64, remote: &Remote, host: Ipv4Addr) -> Result<f64> {
    let half = usize::try_from(rate / 8 / 4)?.min(32_000_000);
    let listener = TcpListener::bind((host, PORT))?;
    let to = SocketAddr::from((host, PORT));
    let mut sender =
        remote.enter(|| TcpStream::connect_timeout(&to, LIMIT)).context("measuring")?;
    let (mut receiver, _) = listener.accept()?;
    // It stays in slow start where CUBIC would leave it at the first jitter (HyStart, RFC 9406).
    setsockopt(&sender, sockopt::TcpCongestion, &OsString::from("reno"))?;
    sender.set_write_timeout(Some(LIMIT))?;
    receiver.set_read_timeout(Some(LIMIT))?;
    thread::scope(|scope| {
        let sending = scope.spawn(move || sender.write_all(&vec![0; 2 * half]));
        let mut chunk = vec![0; 1 << 18];
        let (mut got, mut start, mut caught_up) = (0, None, false);
        let begun = Instant::now();
        loop {
            let len = receiver.read(&mut chunk).context("measuring the rate")?;
            if len == 0 {
                break;
            }
            got += len;
            // Frames that wait here when the clock starts would count as if they came afterwards:
            // the clock starts when a read has found less than it had room for.
            if (half..half + half / 2).contains(&got) && !caught_up {
                caught_up = len < chunk.len();
                start = (caught_up || start.is_none()).then(|| (got, Instant::now())).or(start);
            }
        }
        let (before, at) = start.context("the connection ended early")?;
        let per_second = |bytes, since: Instant| 8.0 * bytes as f64 / since.elapsed().as_secs_f64();
        let (of_half, of_all) = (per_second(got - before, at), per_second(got, begun));
        sending.join().expect("does not panic")?;
        let too_fast = of_half > 1.05 * PAYLOAD_SHARE * rate as f64;
        Ok(if too_fast { of_all } else { of_half })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_delay_is_on_one_way_and_a_long_one_on_both() {
        assert_eq!([one_way(0, 90_000), one_way(1, 90_000)], [0, 90_000]);
        assert_eq!([one_way(0, 9_900_000), one_way(1, 9_900_000)], [4_950_000; 2]);
    }

    #[test]
    fn a_line_that_is_slower_faster_or_later_than_its_name_is_refused() {
        let found = |round_trip_ms, rate_mbit_s| Measured { round_trip_ms, rate_mbit_s };
        assert!(judge(Link::Metro.shape(), found(10.1, 990.0)).is_ok());
        assert!(judge(Link::Lan.shape(), found(0.2, 4000.0)).is_ok(), "a slow machine");
        for bad in [found(9.4, 990.0), found(10.8, 990.0), found(10.1, 940.0), found(10.1, 1060.0)]
        {
            assert!(judge(Link::Metro.shape(), bad).is_err(), "{bad:?}");
        }
    }
}
