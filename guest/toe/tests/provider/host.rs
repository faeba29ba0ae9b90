//! A host that a test plays: UNIX sockets in a directory, as the provider's builds with assertions
//! know them. It connects guests' sockets with guests' listeners and carries bytes between them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use nightporter_core::toe::control::{Answer, Ask, Asked, Code, LEN, PORT, Program, SOCKETS};
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::state::State as Standing;
use nightporter_core::toe::vsock::Ports;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, bind, connect, socket};

/// See the module doc.
pub(crate) struct Host {
    directory: PathBuf,
    state: Arc<Mutex<State>>,
}

/// Something that is waited for may have changed.
static CHANGED: Condvar = Condvar::new();
/// Nothing takes longer.
const PATIENCE: Duration = Duration::from_secs(20);

/// The host's state.
pub(crate) struct State {
    /// The guest's addresses.
    pub(crate) ips: Vec<IpAddr>,
    /// Where there is no TOE.
    pub(crate) native: BTreeSet<IpAddr>,
    /// Unreachable addresses.
    pub(crate) nowhere: BTreeSet<IpAddr>,
    /// Addresses that do not answer and are not known to be unreachable.
    pub(crate) mute: BTreeSet<IpAddr>,
    /// Programs that have asked to connect.
    pub(crate) programs: Vec<Program>,
    wanted: BTreeMap<u32, (SocketAddr, SocketAddr)>,
    listeners: Vec<Listener>,
    /// How often it was asked for one.
    pub(crate) asked_to_listen: usize,
    /// Control connections, by number.
    controls: BTreeMap<usize, UnixStream>,
    next_control: usize,
    /// It does not take control connections, as a device without a daemon.
    is_away: bool,
    /// Control connections that were tried since it is.
    pub(crate) attempts: usize,
    /// It does not answer.
    is_silent: bool,
    /// Requests that have come since it does not.
    unanswered: usize,
    sockets: BTreeMap<Ports, Known>,
    /// Connections that go on.
    streams: BTreeMap<Ports, UnixStream>,
    next_port: u32,
    /// Connections between two guests' sockets that there were.
    pub(crate) connections: usize,
}

struct Listener {
    at: SocketAddr,
    /// The guest's vsock port.
    guest: u32,
    /// It hears IPv4 as well.
    v4: bool,
    /// The control connection that asked for it last.
    control: usize,
}

struct Known {
    own: SocketAddr,
    other: SocketAddr,
    code: Code,
    standing: Standing,
    /// Its close() is a reset.
    lingers: bool,
    /// Its process reads no more.
    is_deaf: bool,
}

impl Known {
    fn new(own: SocketAddr, other: SocketAddr, code: Code) -> Self {
        let standing = if code == Code::Done { Standing::Open } else { Standing::Failed };
        Self { own, other, code, standing, lingers: false, is_deaf: false }
    }
}

impl Host {
    /// One for a guest with this address.
    pub(crate) fn new(directory: &Path, ip: IpAddr) -> Self {
        fs::create_dir_all(directory).expect("a directory");
        let state = Arc::new(Mutex::new(State {
            ips: vec![ip],
            native: BTreeSet::new(),
            nowhere: BTreeSet::new(),
            mute: BTreeSet::new(),
            programs: Vec::new(),
            wanted: BTreeMap::new(),
            listeners: Vec::new(),
            asked_to_listen: 0,
            controls: BTreeMap::new(),
            next_control: 0,
            is_away: false,
            attempts: 0,
            is_silent: false,
            unanswered: 0,
            sockets: BTreeMap::new(),
            streams: BTreeMap::new(),
            next_port: 1 << 16,
            connections: 0,
        }));
        let host = Self { directory: directory.to_path_buf(), state };
        host.serve(PORT, |stream, _, state| control(stream, &state));
        let directory = host.directory.clone();
        host.serve(SOCKETS, move |stream, guest, state| {
            connected(&directory, stream, guest, &state);
        });
        host
    }

    /// The host's state.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic")
    }

    /// Waits until somebody listens at this port.
    pub(crate) fn wait_for_listener(&self, port: u16) {
        let listens = |state: &State| state.listeners.iter().any(|known| known.at.port() == port);
        self.wait_until(&format!("nobody listens at port {port}"), listens);
    }

    fn wait_until(&self, otherwise: &str, is_so: impl Fn(&State) -> bool) {
        let waited = CHANGED.wait_timeout_while(self.state(), PATIENCE, |state| !is_so(state));
        assert!(!waited.expect("no panic").1.timed_out(), "{otherwise}");
    }

    /// From now on it takes no control connection, or again.
    pub(crate) fn be_away(&self, is_away: bool) {
        let mut state = self.state();
        (state.is_away, state.attempts) = (is_away, 0);
        CHANGED.notify_all();
    }

    /// From now on it answers nobody who asks, or again.
    pub(crate) fn be_silent(&self, is_silent: bool) {
        let mut state = self.state();
        (state.is_silent, state.unanswered) = (is_silent, 0);
        CHANGED.notify_all();
    }

    /// Waits until so many have asked and were not answered.
    pub(crate) fn wait_for_unanswered(&self, count: usize) {
        self.wait_until("nobody asks", |state| state.unanswered >= count);
    }

    /// Its daemon is another one, which knows nothing of connections and listeners.
    pub(crate) fn restart(&self) {
        let mut state = self.state();
        state.listeners.clear();
        for (ports, stream) in std::mem::take(&mut state.streams) {
            state.fail([ports]);
            let _ = stream.shutdown(Shutdown::Both);
        }
        for control in state.controls.values() {
            let _ = control.shutdown(Shutdown::Both);
        }
    }

    fn serve(
        &self,
        port: u32,
        each: impl Fn(UnixStream, u32, Arc<Mutex<State>>) + Clone + Send + 'static,
    ) {
        let listener = UnixListener::bind(self.directory.join(format!("h.{port}")));
        let listener = listener.expect("a listener");
        let state = Arc::clone(&self.state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.expect("accepted");
                let peer = stream.peer_addr().expect("a peer");
                let name = peer.as_pathname().and_then(Path::extension);
                let guest = name.map_or(0, |port| port.to_string_lossy().parse().expect("a port"));
                let (state, each) = (Arc::clone(&state), each.clone());
                thread::spawn(move || each(stream, guest, state));
            }
        });
    }
}

/// A control connection.
fn control(mut stream: UnixStream, shared: &Mutex<State>) {
    let mut state = shared.lock().expect("no panic");
    if state.is_away {
        state.attempts += 1;
        let away = CHANGED.wait_timeout_while(state, PATIENCE, |state| state.is_away);
        state = away.expect("no panic").0;
    }
    if stream.write_all(b"!").is_err() {
        // It was not waited for.
        return;
    }
    state.next_control += 1;
    let own = state.next_control;
    state.controls.insert(own, stream.try_clone().expect("a copy"));
    drop(state);
    let mut request = [0; LEN];
    while stream.read_exact(&mut request).is_ok() {
        let asked = Asked::parse(&request).expect("a request");
        let mut state = shared.lock().expect("no panic");
        state.unanswered += usize::from(state.is_silent);
        CHANGED.notify_all();
        let waited = CHANGED.wait_timeout_while(state, PATIENCE, |state| state.is_silent);
        let answer = waited.expect("no panic").0.answer(own, asked);
        if stream.write_all(&answer.emit()).is_err() {
            break;
        }
    }
    let mut state = shared.lock().expect("no panic");
    state.controls.remove(&own);
    state.listeners.retain(|listener| listener.control != own);
}

impl State {
    fn answer(&mut self, control: usize, asked: Asked) -> Answer {
        if let Ask::Connect { to, from, program, .. } = asked.ask {
            if to.ip().is_unspecified() {
                // Nobody connects to that: it is asked who the guest is.
                let own = self.ips.iter().find(|ip| ip.is_ipv4() == to.is_ipv4());
                let addresses = own.map(|own| (SocketAddr::new(*own, from.port()), to));
                return Answer { addresses, ..Answer::of(asked, Code::Native) };
            }
            self.programs.push(program);
        }
        let code = match asked.ask {
            Ask::Connect { to, .. } if self.native.contains(&to.ip()) => Code::Native,
            Ask::Connect { from, .. }
                if !from.ip().is_unspecified() && !self.ips.contains(&from.ip()) =>
            {
                Code::Failed(Errno::AddressNotAvailable)
            }
            Ask::Connect { guest, from, to, .. } => {
                assert!(from.port() != 0, "{asked:?}");
                let mut own = self.ips.iter().filter(|ip| ip.is_ipv4() == from.is_ipv4());
                let own = match from.ip() {
                    any if any.is_unspecified() => *own.next().expect("one of that family"),
                    ip => ip,
                };
                self.wanted.insert(guest, (SocketAddr::new(own, from.port()), to));
                Code::Done
            }
            Ask::Listen { guest, at, v4 } => {
                self.asked_to_listen += 1;
                // One listener for a port: the last request has it.
                self.listeners.retain(|known| (known.at, known.guest) != (at, guest));
                self.listeners.push(Listener { at, guest, v4, control });
                CHANGED.notify_all();
                Code::Done
            }
            Ask::Unlisten { .. } => Code::Done,
            Ask::Describe(ports)
            | Ask::Linger(ports)
            | Ask::Unlinger(ports)
            | Ask::Deafen(ports) => {
                let Some(known) = self.sockets.get_mut(&ports) else {
                    return Answer::of(asked, Code::Failed(Errno::Reset));
                };
                match asked.ask {
                    Ask::Linger(_) => known.lingers = true,
                    Ask::Unlinger(_) => known.lingers = false,
                    // This host drops later bytes and counts them as read.
                    Ask::Deafen(_) => {
                        known.is_deaf = true;
                        let stream = self.streams.get(&ports);
                        let _ = stream.map(|stream| stream.shutdown(Shutdown::Write));
                    }
                    _ => {}
                }
                let addresses = Some((known.own, known.other));
                let state = Some(known.standing);
                return Answer { addresses, state, ..Answer::of(asked, known.code) };
            }
        };
        Answer::of(asked, code)
    }

    fn listener(&self, to: SocketAddr) -> Option<u32> {
        let hears = |at: &SocketAddr, v4: bool| {
            let any = at.ip().is_unspecified() && (v4 || at.is_ipv4() == to.is_ipv4());
            at.port() == to.port() && (any || at.ip() == to.ip())
        };
        let mut all = self.listeners.iter();
        all.find(|known| hears(&known.at, known.v4)).map(|known| known.guest)
    }

    fn refuse(&mut self, ports: Ports) {
        let known = self.sockets.get_mut(&ports).expect("it is there");
        (known.code, known.standing) = (Code::Native, Standing::Failed);
    }

    fn fail<const N: usize>(&mut self, ports: [Ports; N]) {
        for ports in ports {
            if let Some(known) = self.sockets.get_mut(&ports) {
                (known.code, known.standing) = (Code::Failed(Errno::Reset), Standing::Failed);
            }
        }
    }

    /// The first has finished, and the second has all of it.
    fn finish(&mut self, ports: [Ports; 2]) {
        let steps = [
            [(Standing::Open, Standing::Finished), (Standing::Remaining, Standing::Over)],
            [(Standing::Open, Standing::Remaining), (Standing::Finished, Standing::Over)],
        ];
        for (ports, steps) in ports.iter().zip(steps) {
            let known = self.sockets.get_mut(ports).expect("it is there");
            let step = steps.iter().find(|(before, _)| known.standing == *before);
            known.standing = step.map_or(known.standing, |(_, after)| *after);
        }
    }
}

/// A guest's socket is connected to the port of sockets.
fn connected(directory: &Path, mut stream: UnixStream, guest: u32, shared: &Mutex<State>) {
    let mut state = shared.lock().expect("no panic");
    let (own, other) = state.wanted.remove(&guest).expect("it has asked");
    let is_mute = |state: &mut State| state.mute.contains(&other.ip());
    let waited = CHANGED.wait_timeout_while(state, PATIENCE, is_mute);
    state = waited.expect("no panic").0;
    let listener = state.listener(other);
    let code = match listener {
        _ if state.nowhere.contains(&other.ip()) => Code::Failed(Errno::HostUnreachable),
        None => Code::Native,
        Some(_) => Code::Done,
    };
    let ports = Ports { guest, host: SOCKETS };
    state.sockets.insert(ports, Known::new(own, other, code));
    let Some(listener) = listener.filter(|_| code == Code::Done) else { return };
    state.next_port += 1;
    let far = Ports { guest: listener, host: state.next_port };
    state.sockets.insert(far, Known::new(other, own, Code::Done));
    let Ok(second) = call(directory, far) else {
        // It is full; or it listens no more, and the control connection that says so is not read
        // yet.
        state.refuse(ports);
        return;
    };
    state.connections += 1;
    drop(state);
    stream.write_all(b"!").expect("told");
    let (from, to) = (stream.try_clone().expect("a copy"), second.try_clone().expect("a copy"));
    for (ports, stream) in [(ports, &stream), (far, &second)] {
        let copy = stream.try_clone().expect("a copy");
        let mut state = shared.lock().expect("no panic");
        if state.sockets[&ports].is_deaf {
            let _ = copy.shutdown(Shutdown::Write);
        }
        state.streams.insert(ports, copy);
    }
    thread::scope(|scope| {
        scope.spawn(|| carry(shared, [ports, far], from, to));
        carry(shared, [far, ports], second, stream);
    });
    shared.lock().expect("no panic").streams.retain(|known, _| ![ports, far].contains(known));
}

/// Calls a guest that listens. As one of vsock, a listener that is full does not make it wait.
fn call(directory: &Path, ports: Ports) -> nix::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None);
    let fd = fd.expect("a socket");
    let path = |name: String| UnixAddr::new(&directory.join(name)).expect("an address");
    bind(fd.as_raw_fd(), &path(format!("h.{}", ports.host))).expect("bound");
    connect(fd.as_raw_fd(), &path(format!("g.{}", ports.guest)))?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false).expect("a socket");
    Ok(stream)
}

/// Carries what one writes to the other. `ports` are those of both.
fn carry(state: &Mutex<State>, ports: [Ports; 2], mut from: UnixStream, mut to: UnixStream) {
    let mut bytes = vec![0; 64 * 1024];
    loop {
        let got = from.read(&mut bytes);
        let got = match got {
            Ok(0) => {
                let mut state = state.lock().expect("no panic");
                if state.sockets[&ports[0]].lingers {
                    state.fail(ports);
                    let _ = to.shutdown(Shutdown::Both);
                }
                state.finish(ports);
                break;
            }
            Ok(got) => got,
            // It was closed with data in it.
            Err(_) => {
                state.lock().expect("no panic").fail(ports);
                let _ = to.shutdown(Shutdown::Both);
                break;
            }
        };
        if to.write_all(&bytes[..got]).is_err() {
            if state.lock().expect("no panic").sockets[&ports[1]].is_deaf {
                continue;
            }
            // Nobody is there any more to read it.
            state.lock().expect("no panic").fail(ports);
            let _ = from.shutdown(Shutdown::Both);
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
    // It may be reset still.
    let mut closed = [PollFd::new(from.as_fd(), PollFlags::empty())];
    poll(&mut closed, PollTimeout::NONE).expect("no signals");
    let mut state = state.lock().expect("no panic");
    if state.sockets[&ports[0]].lingers {
        state.fail(ports);
        let _ = to.shutdown(Shutdown::Both);
    }
}
