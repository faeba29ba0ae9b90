//! Children that die with the lab, whatever happens to it.
//!
//! Three nets: dropping a [`Process`] kills it; SIGINT, SIGTERM and SIGHUP kill all of them
//! ([`die_cleanly_on_signals`]); and the kernel kills them when the lab itself was killed
//! (PR_SET_PDEATHSIG).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::rundir;
use crate::sys;

/// Process ids of all children that have not been reaped.
static LIVE: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// A child whose output goes to a log file.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output in `log` and with the standard input it has been given
    /// (none, say). Call from a thread that outlives the child: the child dies with it.
    ///
    /// # Errors
    /// The program or the log cannot be started or made.
    pub fn spawn(name: &str, mut command: Command, log: &Path) -> Result<Self> {
        let file = File::create(log).with_context(|| format!("creating {}", log.display()))?;
        command.stdout(file.try_clone()?).stderr(file);
        sys::die_with_parent(&mut command);
        let mut live = LIVE.lock().expect("no panics under this lock");
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", command.get_program().display()))?;
        live.insert(child.id().cast_signed());
        Ok(Self { name: name.to_owned(), child, log: log.to_owned() })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Fails, with the end of its log, when the child has ended.
    ///
    /// # Errors
    /// It has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}): {}", self.name, tail(&self.log)),
        }
    }

    /// Kills it and its process group at once and reaps it. (User-mode Linux has children.)
    pub fn kill(&mut self) {
        let _ = killpg(Pid::from_raw(self.pid()), Signal::SIGKILL);
        self.reap();
    }

    /// Asks it to end (SIGTERM) and waits for that; kills it when it takes longer than `limit`.
    ///
    /// # Errors
    /// It had to be killed.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        let _ = kill(Pid::from_raw(self.pid()), Signal::SIGTERM);
        let deadline = Instant::now() + limit;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                self.reap();
                return Ok(status);
            }
            thread::sleep(Duration::from_millis(5)); // polls the condition "has ended"
        }
        self.kill();
        bail!("{} did not end within {limit:?} of SIGTERM: {}", self.name, tail(&self.log))
    }

    fn reap(&mut self) {
        let _ = self.child.wait();
        LIVE.lock().expect("no panics under this lock").remove(&self.pid());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last lines of a log, for an error message.
#[must_use]
pub fn tail(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    if lines.is_empty() {
        return format!("no output in {}", log.display());
    }
    lines[lines.len().saturating_sub(8)..].join("\n  ")
}

/// A thread's time on its core so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuUse {
    /// Time on it.
    pub time: Duration,
    /// How often it was switched to.
    pub switches: u64,
}

impl CpuUse {
    /// Of one thread (Documentation/scheduler/sched-stats.rst: time on the core in ns, time waiting
    /// for it, number of slices).
    ///
    /// # Errors
    /// It is gone, or the kernel was built without scheduler information.
    pub fn of_thread(thread: i32) -> Result<Self> {
        let path = format!("/proc/{thread}/schedstat");
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        let mut fields = text.split_whitespace().map(str::parse);
        match (fields.next(), fields.next(), fields.next()) {
            (Some(Ok(ns)), Some(Ok(_)), Some(Ok(switches))) => {
                Ok(Self { time: Duration::from_nanos(ns), switches })
            }
            _ => bail!("{path} says {text:?}"),
        }
    }

    /// Of all living threads of a process but those in `without`.
    ///
    /// # Errors
    /// It is gone.
    pub fn of_process(pid: i32, without: &[i32]) -> Result<Self> {
        let mut sum = Self::default();
        for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
            let thread = entry?.file_name().to_string_lossy().parse()?;
            // A worker of QEMU may end at any time.
            if let (false, Ok(one)) = (without.contains(&thread), Self::of_thread(thread)) {
                sum.time += one.time;
                sum.switches += one.switches;
            }
        }
        Ok(sum)
    }
}

/// Runs a short command to its end; its standard output.
///
/// # Errors
/// It cannot be started or fails; the message holds its standard error.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(args);
    sys::die_with_parent(&mut command);
    let out = command.output().with_context(|| format!("{program} is not installed?"))?;
    if !out.status.success() {
        let error = String::from_utf8_lossy(&out.stderr);
        bail!("{program} {}: {}", args.join(" "), error.trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// From now on SIGINT, SIGTERM and SIGHUP kill all children, undo what this process's runs
/// have changed, and end it. Call once, before other threads are started.
///
/// # Errors
/// The signals cannot be blocked.
pub fn die_cleanly_on_signals() -> Result<()> {
    let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    signals.thread_block()?;
    thread::spawn(move || {
        let signal = signals.wait().expect("these signals can be waited for");
        INTERRUPTED.store(true, Ordering::SeqCst);
        eprintln!("\n{signal}: cleaning up");
        let live = LIVE.lock().expect("no panics under this lock"); // kept: no more children
        for pid in live.iter().map(|&pid| Pid::from_raw(pid)) {
            let _ = killpg(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None); // the main thread may reap it first
        }
        rundir::undo_mine();
        std::process::exit(128 + signal as i32);
    });
    Ok(())
}

/// Waits for ever when a signal is ending the lab: the error the caller is about to report is
/// only the echo of children killed by the signal's clean-up.
pub fn yield_to_signal() {
    while INTERRUPTED.load(Ordering::SeqCst) {
        thread::park();
    }
}
