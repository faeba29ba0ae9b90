//! Work that may wait or takes long, on a thread of its own: one piece at a time. The worker goes
//! on, and an event tells it when the work is done.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use rustix::event::{EventfdFlags, eventfd};

/// The thread.
#[derive(Debug)]
pub(crate) struct Aside<Job, Done> {
    jobs: SyncSender<Job>,
    done: Receiver<Done>,
    wake: Arc<OwnedFd>,
}

impl<Job: Send + 'static, Done: Send + 'static> Aside<Job, Done> {
    /// A thread that `does` a job; a mistake of ours in that becomes `failed`, and ends nothing. To
    /// be called before the worker gets its core and its priority, which threads inherit. Errors:
    /// the system's.
    pub(crate) fn start(
        name: &str,
        does: impl Fn(Job) -> Done + Send + 'static,
        failed: impl Fn() -> Done + Send + 'static,
    ) -> io::Result<Self> {
        let wake = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let (jobs, from_worker) = sync_channel::<Job>(1);
        let (to_worker, done) = sync_channel(1);
        let wakes = Arc::clone(&wake);
        std::thread::Builder::new().name(name.into()).spawn(move || {
            for job in from_worker {
                let result = catch_unwind(AssertUnwindSafe(|| does(job)));
                if to_worker.send(result.unwrap_or_else(|_| failed())).is_err() {
                    return; // the daemon ends
                }
                let _ = rustix::io::write(&*wakes, &1_u64.to_ne_bytes());
            }
        })?;
        Ok(Self { jobs, done, wake })
    }

    /// Readable when a job is done.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Begins with `job`; there must be no other.
    pub(crate) fn begin(&self, job: Job) {
        self.jobs.try_send(job).expect("one at a time");
    }

    /// The result.
    #[must_use]
    pub(crate) fn poll(&self) -> Option<Done> {
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        self.done.try_recv().ok()
    }
}
