//! A stranger whose packets have nothing to do with the daemon, but whose softirq runs on the core
//! that the daemon is on, in the middle of whatever it does there.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use nix::unistd::gettid;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with};
use rustix::thread::{
    CpuSet, LinkNameSpaceType, Pid, move_into_link_name_space, sched_setaffinity,
};

use crate::street::Street;
use crate::times::{Times, at_fixed_times, judge_beside};

/// Datagrams that are sent one after the other: a softirq reads 300 at a time.
const BURST: usize = 512;
/// Milliseconds between bursts: a softirq for one is over by the next.
const BETWEEN: u64 = 8;
/// Likewise, of datagrams that cost more.
const LOUD_BURST: usize = 32;
/// Sockets that hear a broadcast, which is copied to each in the softirq; and their port.
const HEARERS: usize = 500;
const HEARERS_PORT: u16 = 7777;
/// A guest that wants nothing for so many milliseconds: its next notification is made by a thread.
const PAUSE: u64 = 25;
const PAUSES: usize = 40;
/// Of the daemon; the stranger sends on the other one.
const CORE: usize = 0;

/// A network of its own, of whose loopback the softirqs run on [`CORE`] (RPS, Linux'
/// Documentation/networking/scaling.rst).
struct Away(Child);

impl Away {
    /// `None`, which is said: it takes root, RPS and two cores.
    fn new() -> Option<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let steered = format!("echo {:x} > /sys/class/net/lo/queues/rx-0/rps_cpus", 1 << CORE);
        let script =
            format!("mount -t sysfs none /sys && ip link set lo up && {steered} && echo && cat");
        let mut process = Command::new("unshare");
        process.args(["--net", "--mount", "sh", "-c", &script]);
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut away = Self(process.spawn().ok()?);
        let mut line = String::new();
        let said = BufReader::new(away.0.stdout.take()?).read_line(&mut line);
        if cores < 2 || said.is_ok_and(|len| len == 0) {
            crate::skips("there is no network of our own with RPS here (root), or one core");
            return None;
        }
        Some(away)
    }

    /// This thread is there from now on.
    fn enter(&self) {
        let network = File::open(format!("/proc/{}/ns/net", self.0.id())).unwrap();
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Softirqs for received packets that have run on [`CORE`].
fn softirqs() -> u64 {
    let all = std::fs::read_to_string("/proc/softirqs").unwrap();
    let line = all.lines().find_map(|line| line.trim_start().strip_prefix("NET_RX:")).unwrap();
    line.split_whitespace().nth(CORE).unwrap().parse().unwrap()
}

fn on(core: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(core);
    set
}

/// All threads of the daemon are on [`CORE`], and they and this one come before whatever else this
/// machine does: it is about softirqs alone.
fn pin(street: &Street) {
    let mut threads = vec![gettid().to_string()];
    for task in std::fs::read_dir(format!("/proc/{}/task", street.host.pid())).unwrap() {
        let thread = task.unwrap().file_name().into_string().unwrap();
        sched_setaffinity(Pid::from_raw(thread.parse().unwrap()), &on(CORE)).unwrap();
        threads.push(thread);
    }
    let renice = Command::new("renice").args(["-n", "-20", "-p"]).args(&threads).output();
    assert!(renice.unwrap().status.success(), "root may");
}

#[test]
fn a_strangers_packets_on_the_workers_core_ban_nobody_and_delay_nobody_for_long() {
    let Some(away) = Away::new() else { return };
    let mut street = Street::new("ack_offload = false");
    pin(&street);
    let is_loud = AtomicBool::new(false);
    let (is_over, sends, bursts) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let before = softirqs();
    thread::scope(|scope| {
        let stranger = scope.spawn(|| {
            away.enter();
            sched_setaffinity(None, &on(CORE + 1)).unwrap();
            let _hearers: Vec<_> = (0..HEARERS).map(|_| hearer()).collect();
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.set_broadcast(true).unwrap();
            let port = socket.local_addr().unwrap().port();
            let to_one = SocketAddr::from(([127, 0, 0, 1], port));
            let to_all = SocketAddr::from(([127, 255, 255, 255], HEARERS_PORT));
            let (mut times, mut woken) = (Times::default(), Times::default());
            while !is_over.load(Ordering::Relaxed) {
                let is_loud = is_loud.load(Ordering::Relaxed);
                let (burst, to) = if is_loud { (LOUD_BURST, to_all) } else { (BURST, to_one) };
                at_fixed_times(BETWEEN, &mut times, &mut woken, || {});
                if sends.load(Ordering::Relaxed) {
                    let sent = (0..burst).filter(|_| socket.send_to(&[7; 100], to).is_ok());
                    bursts.fetch_add(u64::from(sent.count() == burst), Ordering::Relaxed);
                }
            }
        });
        let _over = Over(&is_over);
        let sends = |on| sends.store(on, Ordering::Relaxed);
        judge_beside(true, sends, || _ = street.echo());
        // Notifications after pauses, which are judged by how long they take, beside datagrams each
        // of which costs more than a short call.
        is_loud.store(true, Ordering::Relaxed);
        sends(true);
        let (mut times, mut woken) = (Times::default(), Times::default());
        for _ in 0..PAUSES {
            at_fixed_times(PAUSE, &mut times, &mut woken, || {});
            at_fixed_times(PAUSE, &mut times, &mut woken, || _ = street.echo());
        }
        drop(_over);
        stranger.join().unwrap();
    });
    let (ran, bursts) = (softirqs() - before, bursts.load(Ordering::Relaxed));
    assert!(ran >= bursts && bursts > 100, "{ran} softirqs for {bursts} bursts");
    for name in ["a", "b"] {
        let port = street.host.port(name);
        assert_eq!((port.link, port.vm.unwrap().blocked), (true, 0), "{name}");
    }
    eprintln!("{bursts} bursts, {ran} softirqs");
}

/// One of those to whom a broadcast is copied.
fn hearer() -> UdpSocket {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let socket = socket.unwrap();
    set_socket_reuseaddr(&socket, true).unwrap();
    bind(&socket, &SocketAddr::from(([0, 0, 0, 0], HEARERS_PORT))).unwrap();
    socket.into()
}

/// The stranger ends whatever becomes of the test.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
