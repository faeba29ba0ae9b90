//! A daemon for the booster, and processes that look like VMs.

use std::cell::Cell;
use std::fs::{read_to_string, write};
use std::io::{BufRead, BufReader, Write as _};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nightporter_api::BoostAccount;
use nightporter_boost::protocol::{Budget, Order, PACKET_BYTES_MAX, Report, VERSION};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, Backlog, MsgFlags, SockFlag, SockType, UnixAddr, bind, listen, recv, send,
    socket,
};
use nix::unistd::{Pid, gettid};
use rustix::net::{SocketFlags, accept_with};

/// Everything is taken back within this time (BST-03).
pub(crate) const SOON: Duration = Duration::from_millis(100);
/// Anything else, on a machine with other work.
const LATE: Duration = Duration::from_secs(8);
/// The core of the VMs, and that of the worker.
const CORES: [usize; 2] = [1, 0];
static NUMBER: AtomicU32 = AtomicU32::new(0);
/// One test at a time has the core.
static CORE: Mutex<()> = Mutex::new(());

/// A name of this test's own.
fn name() -> String {
    format!("np-boost-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Waits for `done`, looking again as fast as it can.
pub(crate) fn within(limit: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < limit, "not within {limit:?}: {what}");
        let _ = poll(&mut [], PollTimeout::from(1_u8));
    }
}

/// Says that a test shows nothing here, past libtest's capture: `.ci/test` counts such lines.
pub(crate) fn skips(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// A cgroup of version 1, which goes with it.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// `rt_us`: real-time microseconds a second that its threads may have.
    pub(crate) fn new(rt_us: Option<u32>) -> Self {
        let it = Self(PathBuf::from("/sys/fs/cgroup/cpu").join(name()));
        std::fs::create_dir(&it.0).expect("a cgroup hierarchy with the cpu controller");
        if let Some(us) = rt_us {
            it.writes("cpu.rt_runtime_us", &us.to_string());
        }
        it
    }

    pub(crate) fn writes(&self, file: &str, text: &str) {
        write(self.0.join(file), text).unwrap_or_else(|e| panic!("{file}: {e}"));
    }

    pub(crate) fn reads(&self, file: &str) -> String {
        read_to_string(self.0.join(file)).unwrap().trim().to_owned()
    }

    pub(crate) fn name(&self) -> &str {
        self.0.file_name().and_then(|name| name.to_str()).unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its processes have been waited for, but may still be listed.
        let begin = Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && begin.elapsed() < LATE {
            std::thread::yield_now();
        }
    }
}

/// A process that wants a core, with the name of a vCPU.
pub(crate) struct Hog(Child);

impl Hog {
    pub(crate) fn new(cgroup: &Cgroup) -> Self {
        Self::named("CPU 0/TCG", Some(cgroup))
    }

    /// Without a cgroup it is on the VMs' core, too.
    pub(crate) fn named(name: &str, cgroup: Option<&Cgroup>) -> Self {
        let mut hog = Self::waiting(name, cgroup);
        hog.begins();
        hog
    }

    pub(crate) fn begins(&mut self) {
        drop(self.0.stdin.take());
    }

    /// It does not want its core yet.
    pub(crate) fn waiting(name: &str, cgroup: Option<&Cgroup>) -> Self {
        let script = r#"printf %s "$0" >/proc/$$/comm; echo; read -r; while :; do :; done"#;
        let mut command = Command::new("chrt");
        command.args(["-o", "0", "bash"]); // whatever this test has
        command.args(["-c", script, name]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let hog = Self(child);
        if let Some(cgroup) = cgroup {
            cgroup.writes("cgroup.procs", &hog.pid().to_string());
        }
        pin(hog.pid(), CORES[0]);
        hog.set_nice(0);
        hog
    }

    pub(crate) fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    /// Its scheduling policy, and its nice value.
    pub(crate) fn class(&self) -> (i32, i32) {
        let line = read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let fields: Vec<&str> = line.rsplit_once(')').unwrap().1.split_whitespace().collect();
        (fields[38].parse().unwrap(), fields[16].parse().unwrap())
    }

    /// Seconds of CPU time that it has had, as of the last tick.
    pub(crate) fn used(&self) -> f64 {
        self.times()[0]
    }

    /// [`Self::used`], and how many seconds it has waited for its core.
    pub(crate) fn times(&self) -> [f64; 2] {
        times(self.pid())
    }

    pub(crate) fn set_class(&self, class: &str, priority: &str) {
        let args = [class, "-p", priority, &self.pid().to_string()];
        assert!(Command::new("chrt").args(args).status().unwrap().success());
    }

    pub(crate) fn set_nice(&self, nice: i32) {
        let args = ["-n", &nice.to_string(), "-p", &self.pid().to_string()];
        let command = Command::new("renice").args(args).stdout(Stdio::null()).status();
        assert!(command.unwrap().success());
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pin(pid: i32, core: usize) {
    let mut set = CpuSet::new();
    set.set(core).unwrap();
    sched_setaffinity(Pid::from_raw(pid), &set).unwrap();
}

/// See [`Hog::times`].
fn times(pid: i32) -> [f64; 2] {
    let text = read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
    let mut words = text.split(' ').map(|word| word.parse::<f64>().unwrap() / 1e9);
    [words.next().unwrap(), words.next().unwrap()]
}

/// The program, and this test as its daemon.
pub(crate) struct Booster {
    child: Child,
    listener: OwnedFd,
    connection: Option<OwnedFd>,
    paths: [PathBuf; 2],
    account: Cell<Option<BoostAccount>>,
    /// A process that stands for the daemon's worker.
    worker: Option<Hog>,
    _core: MutexGuard<'static, ()>,
}

impl Booster {
    /// Connected, with a worker on another core.
    pub(crate) fn start() -> Self {
        let mut it = Self::silent();
        let worker = Hog::named("worker", None);
        pin(worker.pid(), CORES[1]);
        kill(Pid::from_raw(worker.pid()), Signal::SIGSTOP).unwrap();
        it.says(&it.hello(&worker, 0));
        it.worker = Some(worker);
        it
    }

    /// Connected; nothing was said.
    pub(crate) fn silent() -> Self {
        let core = CORE.lock().unwrap_or_else(PoisonError::into_inner);
        // The test has to notice what happens, whatever else the machine does.
        let own = gettid().to_string();
        assert!(Command::new("chrt").args(["-r", "-p", "4", &own]).status().unwrap().success());
        let base = std::env::temp_dir().join(name());
        let paths = [base.with_extension("sock"), base.with_extension("journal")];
        let kind = SockType::SeqPacket;
        let listener = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(listener.as_raw_fd(), &UnixAddr::new(&paths[0]).unwrap()).unwrap();
        listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let mut command = Command::new("chrt");
        command.args(["-o", "0", env!("CARGO_BIN_EXE_nightporter-boost")]);
        command.arg("--socket").arg(&paths[0]).arg("--journal").arg(&paths[1]);
        let child = command.spawn().unwrap();
        let (account, worker) = (Cell::new(None), None);
        let mut it =
            Self { child, listener, connection: None, paths, account, worker, _core: core };
        it.meets_again();
        it
    }

    pub(crate) fn meets_again(&mut self) {
        let flags = SocketFlags::CLOEXEC;
        self.connection = Some(accept_with(&self.listener, flags).unwrap());
    }

    pub(crate) fn hangs_up(&mut self) {
        self.connection = None;
    }

    pub(crate) fn hello(&self, worker: &Hog, rt_priority: u8) -> Order {
        Order::Hello { version: VERSION, worker: worker.pid(), rt_priority }
    }

    pub(crate) fn says(&self, order: &Order) {
        let fd = self.connection.as_ref().unwrap().as_raw_fd();
        send(fd, &serde_json::to_vec(order).unwrap(), MsgFlags::MSG_NOSIGNAL).unwrap();
    }

    pub(crate) fn adds(&self, vm: u16, hog: &Hog) {
        self.adds_with(vm, hog, 15_000, None);
    }

    pub(crate) fn adds_in(&self, vm: u16, hog: &Hog, cgroup: &str) {
        self.adds_with(vm, hog, 15_000, Some(cgroup.to_owned()));
    }

    /// `cpu_us`: the CPU time in its window that it may be favoured for.
    pub(crate) fn adds_with(&self, vm: u16, hog: &Hog, cpu_us: u64, vcpu_cgroup: Option<String>) {
        let boost = Some(Budget { cpu_us, window_us: 6 * cpu_us });
        let (name, pid, tap) = (format!("vm{vm}"), hog.pid(), None);
        self.says(&Order::Vm { vm, name, pid, tap, boost, vcpu_cgroup });
    }

    /// Answers pings until `done`.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut() -> bool) {
        within(LATE, what, || {
            self.hears(0);
            done()
        });
    }

    /// The same; until then it is ordered again and again.
    pub(crate) fn until_asking(
        &mut self,
        order: &Order,
        what: &str,
        mut done: impl FnMut() -> bool,
    ) {
        within(LATE, what, || {
            self.hears(0);
            self.says(order);
            done()
        });
    }

    /// So much time passes, in which pings are answered.
    pub(crate) fn passes(&mut self, time: Duration) {
        let begin = Instant::now();
        while begin.elapsed() < time {
            self.hears(1); // a real-time thread that never sleeps would be throttled
        }
    }

    /// The account of a VM that `fits`.
    pub(crate) fn account(
        &mut self,
        vm: u16,
        fits: impl FnMut(&BoostAccount) -> bool,
    ) -> BoostAccount {
        self.account_after(vm, |_| (), fits)
    }

    /// The same; until then this happens again and again, each few milliseconds.
    pub(crate) fn account_after(
        &mut self,
        vm: u16,
        mut happens: impl FnMut(&Self),
        mut fits: impl FnMut(&BoostAccount) -> bool,
    ) -> BoostAccount {
        let begin = Instant::now();
        let mut last = None;
        loop {
            if let Some(account) = last.take().filter(|it| fits(it)) {
                return account;
            }
            assert!(begin.elapsed() < LATE, "no such account: {:?}", self.account.take());
            happens(self);
            if let Some((number, account)) = self.hears(5)
                && number == vm
            {
                last = Some(account);
            }
            if last.is_none()
                && let Some(known) = self.account.take()
            {
                last = Some(known.clone());
                self.account.set(Some(known));
            }
        }
    }

    pub(crate) fn is_ready(&mut self, vm: u16, means: &str) {
        self.account(vm, |it| it.means == means && it.refused.is_empty());
    }

    pub(crate) fn is_refused(&mut self, vm: u16, why: &str) {
        self.account(vm, |it| it.refused.contains(why));
    }

    /// A report, if one comes within so many milliseconds. Pings are answered.
    fn hears(&mut self, ms: u8) -> Option<(u16, BoostAccount)> {
        let connection = self.connection.as_ref().unwrap();
        let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(connection), PollFlags::POLLIN)];
        if poll(&mut fds, PollTimeout::from(ms)).unwrap() == 0 {
            return None;
        }
        let mut buf = [0; PACKET_BYTES_MAX];
        let len = match recv(connection.as_raw_fd(), &mut buf, MsgFlags::MSG_DONTWAIT) {
            Err(Errno::EAGAIN) => return None,
            len => len.unwrap(),
        };
        assert!(len > 0, "the booster has ended");
        match serde_json::from_slice(&buf[..len]).unwrap() {
            Report::Ping {} => {
                self.says(&Order::Pong {});
                None
            }
            Report::Later { .. } => None, // who plays the daemon asks all the time
            Report::Account { vm, account } => {
                self.account.set((vm == 1).then(|| account.clone()).or(self.account.take()));
                Some((vm, account))
            }
        }
    }

    /// Seconds of CPU time that it has had.
    pub(crate) fn used(&self) -> f64 {
        times(self.child.id().cast_signed())[0]
    }

    pub(crate) fn signals_booster(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    pub(crate) fn signals_watcher(&self, signal: Signal) {
        let own = self.child.id();
        let children = read_to_string(format!("/proc/{own}/task/{own}/children"));
        // A dead booster's watcher has another parent.
        let pid = children.ok().and_then(|text| text.trim().parse().ok());
        let pid = pid.or(WATCHER.with(Cell::get)).expect("a watcher");
        WATCHER.with(|it| it.set(Some(pid)));
        kill(Pid::from_raw(pid), signal).unwrap();
    }

    /// Both processes end.
    pub(crate) fn has_ended(&mut self) {
        assert!(!self.child.wait().unwrap().success());
    }

    /// The output of `--take-back`.
    pub(crate) fn takes_back(&self) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nightporter-boost"));
        let output = command.arg("--take-back").arg("--journal").arg(&self.paths[1]).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

thread_local! {
    static WATCHER: Cell<Option<i32>> = const { Cell::new(None) };
}

impl Drop for Booster {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.paths.iter().for_each(|path| {
            let _ = std::fs::remove_file(path);
        });
    }
}
