//! Opens uplinks and overlays that are not there yet, or not any more, and puts uplinks back into
//! their bridges: on a thread of its own. All of that waits for the kernel's lock of the network
//! configuration, and closing an interface that was made in vain for much more.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rustix::event::{EventfdFlags, eventfd};

use crate::config::UplinkConfig;
use crate::port::tap::join_bridge;
use crate::port::{Port, Wanted};
use crate::start::{OpenFailure, open};

/// What is to be tried.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// It is missing.
    Open(Wanted),
    /// It is in no bridge, and should be in one.
    Join(UplinkConfig),
}

/// What has come of it.
#[derive(Debug)]
pub(crate) enum Done {
    Opened(Wanted, Result<Box<Port>, OpenFailure>),
    Joined(UplinkConfig, io::Result<()>),
}

/// The thread.
#[derive(Debug)]
pub(crate) struct Opener {
    tasks: SyncSender<Vec<Task>>,
    done: Receiver<Vec<Done>>,
    wake: Arc<OwnedFd>,
}

impl Opener {
    /// To be called before the worker gets its core and its priority, which threads inherit.
    /// Errors: the system's.
    pub(crate) fn start() -> io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (tasks, from_worker) = sync_channel::<Vec<Task>>(1);
        let (to_worker, done) = sync_channel(1);
        let wakes = Arc::clone(&wake);
        std::thread::Builder::new().name("opener".into()).spawn(move || {
            for tasks in from_worker {
                // What a mistake of ours keeps from being opened is tried again.
                let all = AssertUnwindSafe(|| tasks.into_iter().map(does).collect());
                if to_worker.send(catch_unwind(all).unwrap_or_default()).is_err() {
                    return; // the daemon ends
                }
                let _ = rustix::io::write(&*wakes, &1_u64.to_ne_bytes());
            }
        })?;
        Ok(Self { tasks, done, wake })
    }

    /// Readable when something is done.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Begins with these; there must be no others.
    pub(crate) fn begin(&self, tasks: Vec<Task>) {
        self.tasks.try_send(tasks).expect("the last ones are done");
    }

    /// What has come of them.
    #[must_use]
    pub(crate) fn poll(&self) -> Option<Vec<Done>> {
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        self.done.try_recv().ok()
    }
}

fn does(task: Task) -> Done {
    match task {
        Task::Open(wanted) => {
            let opened = open(&wanted).map(Box::new);
            Done::Opened(wanted, opened)
        }
        Task::Join(config) => {
            let joined = join_bridge(&config);
            Done::Joined(config, joined)
        }
    }
}
