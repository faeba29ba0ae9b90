//! A guest in a network namespace of the test's own, and the host at the other end of its link: a
//! tap. The test is the host, and the remote that the guest's connections lead to.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use etherparse::{PacketBuilder, SlicedPacket, TcpOptionElement, TransportSlice};
use nightporter_core::turn::{Received, Sent};
use nightporter_core::wire::heartbeat::Heartbeat;
use nightporter_core::wire::virtio_net::VirtioNetHdr;
use nightporter_flood::record::Record;
use nightporter_flood::rtnl::{Changes, Rtnl};
use nightporterd::config::{UplinkConfig, UplinkKind};
use nightporterd::port::tap::TapPort;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, connect, setsockopt, socket, sockopt,
};
use nix::unistd::Pid;

const TOOL: &str = env!("CARGO_BIN_EXE_nightporter-guest");
/// Of the guest.
const GUEST: &str = "10.0.0.2/24";
/// A remote behind the default route's gateway.
pub(crate) const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);
/// A remote on the guest's own network.
pub(crate) const NEAR: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);
/// Of the gateways and of `NEAR`.
const MAC: &str = "02:00:00:00:00:09";
/// The MSS option of the remote's SYN-ACK.
pub(crate) const MSS: u32 = 1448;
/// The remote's sequence number after its SYN.
const ISN: u32 = 0xffff_fff1;
/// Its window scale, and its window from then on: 65,535 << 5 is 2 MB.
const SCALE: u8 = 5;
/// Bytes that a connection sends.
const PAYLOAD: usize = 3 << 20;
/// A test that waits longer for anything has failed.
const PATIENCE: Duration = Duration::from_secs(20);

/// See the module doc.
pub(crate) struct World {
    host: TapPort,
    changes: Changes,
    dir: PathBuf,
    port: u16,
    epoch: NonZeroU64,
}

/// A connection of the guest, as the remote knows it.
pub(crate) struct Connection {
    stream: TcpStream,
    /// Of the remote.
    port: u16,
    /// The guest's first segment after its SYN.
    first: Segment,
    /// Bytes that the guest has sent, as captured at the host's end of the link.
    sent: u32,
    /// Bytes of its longest segment in a flight.
    pub(crate) longest: u32,
}

/// A connection whose SYN is on its way.
pub(crate) struct Opening {
    stream: thread::JoinHandle<TcpStream>,
    syn: Segment,
    /// Of the remote.
    port: u16,
}

/// A tool in the foreground.
pub(crate) struct Watch {
    pub(crate) child: Child,
    log: BufReader<ChildStderr>,
}

impl Watch {
    /// Waits until it has said this.
    pub(crate) fn until_said(&mut self, what: &str) {
        let mut line = String::new();
        while !line.contains(what) {
            line.clear();
            assert_ne!(
                self.log.read_line(&mut line).unwrap(),
                0,
                "it ended, and never said {what}"
            );
        }
    }
}

impl World {
    /// Runs a test in a fresh network namespace.
    pub(crate) fn run(test: impl FnOnce(Self) + Send + 'static) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("np-flood-{}-{number}", std::process::id()));
        // The namespace is this thread's, and of the threads and processes that it starts.
        let world_dir = dir.clone();
        let thread = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            test(Self::new(world_dir));
        });
        let outcome = thread.join();
        let _ = std::fs::remove_dir_all(dir);
        outcome.unwrap();
    }

    fn new(dir: PathBuf) -> Self {
        let tap = UplinkConfig {
            name: "lan".into(),
            network: None,
            kind: UplinkKind::Tap,
            ifname: "np0".into(),
            create: true,
            bridge: None,
        };
        let host = TapPort::open(&tap).unwrap();
        ip(&format!("addr add {GUEST} dev np0"));
        for address in ["10.0.0.1", "10.0.0.3", "10.0.0.9"] {
            ip(&format!("neigh add {address} lladdr {MAC} dev np0"));
        }
        ip("route add default via 10.0.0.1 dev np0 metric 100");
        // A probe of the tail would add a segment to a flight.
        std::fs::write("/proc/sys/net/ipv4/tcp_early_retrans", "0").unwrap();
        std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", "reno").unwrap();
        Self {
            host,
            changes: Changes::open().unwrap(),
            dir,
            port: 1000,
            epoch: NonZeroU64::new(9).unwrap(),
        }
    }

    /// The host's daemon is replaced: it knows no connection any more.
    pub(crate) fn another_daemon_starts(&mut self) {
        self.epoch = self.epoch.checked_add(1 << 40).unwrap();
    }

    /// The host's daemon had no place for a while: it knows all connections.
    pub(crate) fn control_begins_again(&mut self) {
        self.epoch = self.epoch.checked_add(1).unwrap();
    }

    /// The host says something.
    pub(crate) fn host_says(&mut self, controls: bool) -> Instant {
        let beat = Heartbeat { controls, epoch: self.epoch };
        self.send(&beat.emit());
        Instant::now()
    }

    /// The tool with these arguments.
    pub(crate) fn tool(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// The tool's output, if it succeeded.
    pub(crate) fn says(&self, arguments: &str) -> String {
        let output = self.tool(arguments);
        assert!(output.status.success(), "{arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// `flood watch`, once it hears heartbeats.
    pub(crate) fn watch(&self, options: &str) -> Watch {
        let mut command = self.command(format!("flood watch {options}").trim());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut watch = Watch { child, log };
        if line.trim() != nightporter_flood::control::READY {
            let mut why = String::new();
            watch.log.read_to_string(&mut why).unwrap();
            panic!("it does not start: {why}");
        }
        watch
    }

    /// The same, not started.
    pub(crate) fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(TOOL);
        command.args(arguments.split(' ')).env("RUNTIME_DIRECTORY", &self.dir);
        command
    }

    /// The tool's record.
    pub(crate) fn record(&self) -> Record {
        serde_json::from_slice(&std::fs::read(self.file("json")).unwrap()).unwrap()
    }

    /// Sends it to the watcher, not to its keeper.
    pub(crate) fn signal_watcher(&self, signal: Signal) {
        signal_process(self.record().watcher.unwrap().try_into().unwrap(), signal);
    }

    /// Waits until no watcher and no keeper is left.
    pub(crate) fn until_nobody_watches(&self) {
        std::fs::File::open(self.file("lock")).unwrap().lock().unwrap();
    }

    fn file(&self, extension: &str) -> PathBuf {
        let files = std::fs::read_dir(&self.dir).unwrap().map(|entry| entry.unwrap().path());
        let mut files = files.filter(|path| path.extension().is_some_and(|e| e == extension));
        files.next().expect("the tool has written it")
    }

    /// Waits until so many routes flood; the time at which they do.
    pub(crate) fn until_flooding(&self, count: usize) -> Instant {
        let rtnl = Rtnl::open().unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let flooding = rtnl.routes().unwrap();
            let flooding = flooding.iter().filter(|route| route.initcwnd() == Some(1000)).count();
            let now = Instant::now();
            if flooding == count {
                return now;
            }
            assert!(now < deadline, "{flooding} routes flood, not {count}: {}", routes());
            readable(self.changes.as_fd(), deadline - now);
            self.changes.take().unwrap();
        }
    }

    /// The guest opens a connection, under this congestion control or its default.
    pub(crate) fn open(&mut self, remote: Ipv4Addr, control: Option<&str>) -> Connection {
        self.open_slowly(remote, control, Duration::ZERO)
    }

    /// The host controls congestion for so long, and the remote says nothing.
    pub(crate) fn host_goes_on(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            self.host_says(true);
            self.hear_nothing(left.min(Duration::from_millis(200)));
        }
    }

    /// The host controls congestion until the tool's status begins like this.
    pub(crate) fn host_goes_on_until(&mut self, status: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            self.host_goes_on(Duration::from_millis(200));
            let now = self.says("flood status");
            if now.starts_with(status) {
                return;
            }
            assert!(Instant::now() < deadline, "{now}");
        }
    }

    /// The same, and the remote takes so long to answer.
    pub(crate) fn open_slowly(
        &mut self,
        remote: Ipv4Addr,
        control: Option<&str>,
        round_trip: Duration,
    ) -> Connection {
        let opening = self.begin_to_open(remote, control);
        self.hear_nothing(round_trip);
        self.finish_opening(opening)
    }

    /// The guest asks for a connection, and the remote has not answered yet.
    pub(crate) fn begin_to_open(&mut self, remote: Ipv4Addr, control: Option<&str>) -> Opening {
        self.port += 1;
        let to = SockaddrIn::from(SocketAddrV4::new(remote, self.port));
        let control = control.map(OsString::from);
        let stream = thread::spawn(move || {
            let flags = SockFlag::SOCK_CLOEXEC;
            let fd = socket(AddressFamily::Inet, SockType::Stream, flags, None).unwrap();
            if let Some(control) = control {
                setsockopt(&fd, sockopt::TcpCongestion, &control).unwrap();
            }
            connect(fd.as_raw_fd(), &to).unwrap();
            TcpStream::from(fd)
        });
        let syn = self.next_segment(self.port);
        assert!(syn.syn && syn.payload == 0, "{syn:?}");
        Opening { stream, syn, port: self.port }
    }

    /// It answers.
    pub(crate) fn finish_opening(&mut self, opening: Opening) -> Connection {
        let Opening { stream, syn, port } = opening;
        self.reply(&syn, 1, true);
        let stream = stream.join().unwrap();
        stream.set_nonblocking(true).unwrap();
        let first = loop {
            let segment = self.next_segment(port); // the third of the handshake
            if !segment.syn {
                break segment;
            }
        };
        assert_eq!((first.sequence, first.payload), (syn.sequence.wrapping_add(1), 0));
        let mut connection = Connection { stream, port, first, sent: 0, longest: 0 };
        self.acknowledge(&mut connection); // only now is the window scaled, and wide
        connection
    }

    /// The guest has a lot to send, and nothing of it is acknowledged: how many bytes it sends
    /// until it repeats itself.
    pub(crate) fn flight(&mut self, connection: &mut Connection) -> u32 {
        let _ = connection.stream.write(&vec![7; PAYLOAD]); // as much as the send buffer takes
        let before = connection.sent;
        loop {
            let segment = self.next_segment(connection.port);
            let end = segment.sequence.wrapping_sub(connection.first.sequence) + segment.payload;
            if segment.payload > 0 && end <= connection.sent {
                return connection.sent - before; // a timeout of the guest: the flight is over
            }
            connection.sent = connection.sent.max(end);
            connection.longest = connection.longest.max(segment.payload);
        }
    }

    /// The flight of a new connection.
    pub(crate) fn first_flight(&mut self, remote: Ipv4Addr, control: Option<&str>) -> u32 {
        let mut connection = self.open(remote, control);
        self.flight(&mut connection)
    }

    /// The guest's program has gone: the connection is reset.
    pub(crate) fn reset(&mut self, connection: Connection) {
        let at_once = nix::libc::linger { l_onoff: 1, l_linger: 0 };
        setsockopt(&connection.stream, sockopt::Linger, &at_once).unwrap();
    }

    /// The guest sends a little, and the remote acknowledges it.
    pub(crate) fn exchange(&mut self, connection: &mut Connection) {
        connection.stream.write_all(b"a little").unwrap();
        let segment = self.next_segment(connection.port);
        assert_eq!(segment.payload, 8);
        connection.sent += segment.payload;
        self.acknowledge(connection);
    }

    /// The guest's retransmission timeout: an idle connection loses half of its window with each.
    pub(crate) fn timeout(&self, connection: &Connection) -> Duration {
        let shown = shown_by("ss", &format!("-Htin dport = :{}", connection.port));
        let timeout = shown.split(" rto:").nth(1).and_then(|rest| rest.split(' ').next());
        Duration::from_millis(timeout.and_then(|ms| ms.parse().ok()).expect(&shown))
    }

    /// The remote acknowledges all that the guest has sent.
    pub(crate) fn acknowledge(&mut self, connection: &mut Connection) {
        self.reply(&connection.first.clone(), connection.sent, false);
    }

    /// The next TCP segment of the guest to this port.
    fn next_segment(&mut self, port: u16) -> Segment {
        let mut buffer = vec![0; 70_000];
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.host.receive(&mut buffer) {
                Received::Frame(_, length) => match Segment::parse(&buffer[..length]) {
                    Some(segment) if segment.to.1 == port => return segment,
                    _ => {} // the kernel sends some IPv6 of its own; FINs of earlier flights
                },
                Received::Empty => {
                    let patience = deadline.saturating_duration_since(Instant::now());
                    assert!(!patience.is_zero(), "the guest says nothing");
                    readable(self.host.fd(), patience);
                }
                Received::Spent => {}
                Received::Gone => panic!("the tap has gone"),
            }
        }
    }

    /// Drops all frames that arrive within `time`.
    pub(crate) fn hear_nothing(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            readable(self.host.fd(), left);
            self.host.receive(&mut vec![0; 70_000]);
        }
    }

    /// The remote acknowledges so many sequence numbers behind `to`'s, with a full window.
    fn reply(&mut self, to: &Segment, behind: u32, syn: bool) {
        let ((from, from_port), (at, at_port)) = (to.to, to.from);
        let mut tcp = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 9], to.mac)
            .ipv4(from, at, 64)
            .tcp(from_port, at_port, if syn { ISN.wrapping_sub(1) } else { ISN }, 65_535)
            .ack(to.sequence.wrapping_add(behind));
        if syn {
            let mss = TcpOptionElement::MaximumSegmentSize(MSS.try_into().unwrap());
            let options = [mss, TcpOptionElement::WindowScale(SCALE)];
            tcp = tcp.syn().options(&options).unwrap();
        }
        let mut frame = Vec::new();
        tcp.write(&mut frame, &[]).unwrap();
        self.send(&frame);
    }

    fn send(&mut self, frame: &[u8]) {
        assert_eq!(self.host.send(&VirtioNetHdr::default(), &[frame]), Sent::Done);
    }
}

impl Drop for World {
    /// Also of a test that failed: nobody is to be left running.
    fn drop(&mut self) {
        let _ = self.command("flood off").output();
    }
}

/// A segment as the host's end of the link sees it.
#[derive(Clone, Copy, Debug)]
struct Segment {
    mac: [u8; 6],
    from: ([u8; 4], u16),
    to: ([u8; 4], u16),
    sequence: u32,
    syn: bool,
    payload: u32,
}

impl Segment {
    fn parse(frame: &[u8]) -> Option<Self> {
        let packet = SlicedPacket::from_ethernet(frame).ok()?;
        let Some(TransportSlice::Tcp(tcp)) = packet.transport else { return None };
        let Some(etherparse::NetSlice::Ipv4(ip)) = packet.net else { return None };
        Some(Self {
            mac: frame[6..12].try_into().unwrap(),
            from: (ip.header().source(), tcp.source_port()),
            to: (ip.header().destination(), tcp.destination_port()),
            sequence: tcp.sequence_number(),
            syn: tcp.syn(),
            payload: tcp.payload().len().try_into().unwrap(),
        })
    }
}

/// All routes but those of addresses, as `ip` shows them.
pub(crate) fn routes() -> String {
    let shown = |family: &str| ip(&format!("{family} -d route show table all"));
    let all = shown("-4") + &shown("-6");
    // A route with an end shows how far that is.
    let steady = all.lines().map(|line| line.split(" expires").next().unwrap_or_default());
    steady.filter(|line| !line.contains("table local")).collect::<Vec<_>>().join("\n")
}

pub(crate) fn ip(arguments: &str) -> String {
    shown_by("ip", arguments)
}

fn shown_by(tool: &str, arguments: &str) -> String {
    let output = Command::new(tool).args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "{tool} {arguments}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Whether idle connections give up their window, in this namespace.
pub(crate) fn slow_start() -> String {
    nightporter_flood::settings::SLOW_START.read().unwrap().unwrap()
}

pub(crate) fn pieces() -> String {
    nightporter_flood::settings::PIECES.read().unwrap().unwrap()
}

pub(crate) fn signal_process(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
}

fn readable(fd: BorrowedFd<'_>, at_most: Duration) {
    let timeout = PollTimeout::try_from(at_most).unwrap();
    poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout).unwrap();
}
