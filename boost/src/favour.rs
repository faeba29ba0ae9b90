//! The acts: a VM's threads, or its cgroup, are favoured, pay back, or are as before.

use std::fs::{read_to_string, write};
use std::io;

use crate::BOOST_PRIORITY;
use crate::journal::{Entry, Journal, NICE_LOW, Place, check_plain, set_nice, unless_gone};
use crate::layout::Means;
use crate::process::Thread;
use crate::sys::{Class, set_class};

/// How a VM runs.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(crate) enum Mode {
    /// As it would without boost.
    #[default]
    Normal,
    /// Before its neighbours.
    Favoured,
    /// After its neighbours.
    Paying,
}

/// A vCPU's thread, and how it runs.
#[derive(Debug)]
pub(crate) struct Vcpu {
    pub(crate) thread: Thread,
    place: Option<Place>,
    is_low: bool,
}

impl Vcpu {
    pub(crate) const fn new(thread: Thread) -> Self {
        Self { thread, place: None, is_low: false }
    }

    /// Brings it into `mode`. Errors: words for the operator; it is as it was, or gone.
    pub(crate) fn set(&mut self, journal: &mut Journal, mode: Mode) -> Result<(), String> {
        let Ok(stat) = self.thread.stat() else {
            self.forget(journal);
            return Ok(());
        };
        let favoured = Class::round_robin(BOOST_PRIORITY);
        let is_favoured = self.place.is_some() && stat.class == favoured;
        if !is_favoured && mode != Mode::Normal {
            check_plain(&stat, self.is_low)?;
        }
        if mode != Mode::Normal && self.place.is_none() {
            let put = journal.put(&Entry::of_thread(self.thread.id, favoured));
            self.place = Some(put.map_err(|e| format!("the journal cannot be written: {e}"))?);
        }
        let tid = self.thread.id.tid;
        let explain = |e: io::Error| match e.raw_os_error() {
            Some(libc::EPERM) => {
                "the kernel refuses a real-time class here (RT_GROUP_SCHED, or no CAP_SYS_NICE)"
                    .into()
            }
            _ => format!("thread {tid} cannot be favoured: {e}"),
        };
        let class = match (mode, is_favoured) {
            (Mode::Favoured, false) => unless_gone(set_class(tid, favoured)),
            (Mode::Normal | Mode::Paying, true) => unless_gone(set_class(tid, Class::NORMAL)),
            _ => Ok(()),
        };
        class.map_err(explain)?;
        // While it is favoured, nice has no effect: it stays, for what is still to be paid.
        let low = mode == Mode::Paying || mode == Mode::Favoured && self.is_low;
        if low != self.is_low {
            unless_gone(set_nice(tid, if low { NICE_LOW } else { 0 })).map_err(explain)?;
            self.is_low = low;
        }
        if mode == Mode::Normal {
            self.forget(journal);
        }
        Ok(())
    }

    fn forget(&mut self, journal: &mut Journal) {
        self.is_low = false;
        if let Some(place) = self.place.take() {
            journal.clear(place);
        }
    }
}

/// A cgroup's weight, while it is not as before.
#[derive(Debug)]
pub(crate) struct Weighed {
    before: u32,
    place: Place,
}

/// Brings the cgroup of `means` into `mode`. Errors: words for the operator.
pub(crate) fn weigh(
    journal: &mut Journal,
    means: &Means,
    state: &mut Option<Weighed>,
    mode: Mode,
) -> Result<(), String> {
    let Means::Weight { file, high, low } = means else { return Ok(()) };
    let explain = |e: io::Error| format!("{}: {e}", file.display());
    if mode == Mode::Normal {
        let Some(weighed) = state.take() else { return Ok(()) };
        match write(file, weighed.before.to_string()) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                *state = Some(weighed);
                return Err(explain(e));
            }
            _ => {
                journal.clear(weighed.place);
                return Ok(());
            }
        }
    }
    if state.is_none() {
        let text = read_to_string(file).map_err(explain)?;
        let before = text.trim().parse().map_err(|_| format!("{}: {text}", file.display()))?;
        let put = journal.put(&Entry::Weight { file: file.clone(), value: before });
        let place = put.map_err(|e| format!("the journal cannot be written: {e}"))?;
        *state = Some(Weighed { before, place });
    }
    let weight = if mode == Mode::Favoured { high } else { low };
    write(file, weight.to_string()).map_err(explain)
}
