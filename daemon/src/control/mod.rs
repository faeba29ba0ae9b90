//! Control: a thread with an epoll set of its own, for work that is not about frames. It has the
//! metrics, and formats statuses; the desk, between two turns of the worker, has the rest so far
//! (docs/design/control.md).
//!
//! It and the worker's thread know of each other only [`Order`]s and [`Report`]s.

pub(crate) mod conn;
pub(crate) mod format;
mod metrics;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use nightporter_api::Status;
use nightporter_core::time::Instant;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollTimeout};

use crate::resting::Resting;
use crate::timer::monotonic_now;
use crate::token::{Token, watch_for};
use crate::worker::orders::{ControlMail, Order, Report, WorkerMail, worker_mail};
use conn::Allowance;
use format::format;
pub(crate) use metrics::MetricsServer;
pub use metrics::is_metrics_request;

/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 64;

/// See the module doc.
#[derive(Debug)]
pub(crate) struct Control {
    epoll: Epoll,
    mail: ControlMail,
    metrics: Option<MetricsServer>,
    /// Listeners that do not accept for now.
    resting: Resting<Token>,
    /// A status for scrapes was ordered, and is not there yet.
    ordered: bool,
}

/// Starts the thread; the worker's end of its mail. To be called before the worker gets its core and
/// its priority, which threads inherit. Errors: the system's.
pub(crate) fn start(metrics: Option<MetricsServer>) -> io::Result<WorkerMail> {
    let (worker, mail) = worker_mail()?;
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    watch_for(&epoll, &mail.fd(), Token::Mail)?;
    if let Some(metrics) = &metrics {
        watch_for(&epoll, &metrics.fd(), Token::MetricsListener)?;
    }
    let control = Control { epoll, mail, metrics, resting: Resting::new(), ordered: false };
    let bell = worker.bell();
    thread::Builder::new().name("control".into()).spawn(move || {
        let ended = catch_unwind(AssertUnwindSafe(move || control.run()));
        bell.ring(); // the worker takes its mail, and finds that nobody writes any more
        if let Ok(Err(error)) = ended {
            tracing::error!(%error, "control's event loop failed");
        }
    })?;
    Ok(worker)
}

impl Control {
    /// Works until the worker's end of the mail is gone.
    fn run(mut self) -> io::Result<()> {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        loop {
            let count = match self.epoll.wait(&mut events, self.wait(monotonic_now())) {
                Err(Errno::EINTR) => 0,
                result => result?,
            };
            let (now, mut writes) = (monotonic_now(), Allowance::default());
            for event in &events[..count] {
                match Token::unpack(event.data()) {
                    Token::Mail => match self.hear(now, &mut writes) {
                        true => {}
                        false => return Ok(()),
                    },
                    Token::MetricsListener => self.handle_metrics_listener(now, &mut writes),
                    Token::Metrics(place) => {
                        if let Some(metrics) = &mut self.metrics {
                            metrics.handle_client(&self.epoll, &mut writes, now, place);
                        }
                    }
                    token => unreachable!("the worker's: {token:?}"),
                }
            }
            self.wake_listeners(now);
            let waits = self.metrics.as_ref().is_some_and(MetricsServer::has_waiting);
            if waits && !std::mem::replace(&mut self.ordered, true) {
                self.mail.order(Order::Survey);
            }
        }
    }

    /// Until listeners have rested, to the next millisecond.
    fn wait(&self, now: Instant) -> EpollTimeout {
        let Some(due) = self.resting.poll_timeout() else { return EpollTimeout::NONE };
        let ms = due.since(now).as_nanos().div_ceil(1_000_000);
        EpollTimeout::try_from(ms).unwrap_or(EpollTimeout::MAX)
    }

    /// Takes the worker's reports. `false`: it is gone.
    fn hear(&mut self, now: Instant, writes: &mut Allowance) -> bool {
        loop {
            match self.mail.take() {
                Err(_) => return false,
                Ok(None) => return true,
                Ok(Some(Report::Status { status, for_operators, for_scrapes })) => {
                    self.handle_status(now, writes, *status, for_operators, for_scrapes);
                }
            }
        }
    }

    fn handle_status(
        &mut self,
        now: Instant,
        writes: &mut Allowance,
        status: Status,
        for_operators: bool,
        for_scrapes: bool,
    ) {
        // A mistake of ours in that leaves no text.
        let texts = catch_unwind(|| format(status, for_operators, for_scrapes));
        let texts = texts.unwrap_or_default();
        self.mail.order(Order::Formatted(texts.for_operators));
        if for_scrapes && let Some(metrics) = &mut self.metrics {
            self.ordered = false;
            match texts.for_scrapes {
                Some(answer) => metrics.handle_answer(&self.epoll, writes, now, answer),
                None => metrics.handle_failure(&self.epoll, writes),
            }
        }
    }

    fn handle_metrics_listener(&mut self, now: Instant, writes: &mut Allowance) {
        let Some(metrics) = &mut self.metrics else { return };
        if metrics.handle_listener(&self.epoll, writes, now).is_err() {
            let _ = self.epoll.delete(metrics.fd());
            self.resting.add(now, Token::MetricsListener);
        }
    }

    fn wake_listeners(&mut self, now: Instant) {
        for token in self.resting.take_due(now) {
            let metrics = self.metrics.as_ref().map(MetricsServer::fd);
            if metrics.is_some_and(|fd| watch_for(&self.epoll, &fd, token).is_err()) {
                self.resting.add(now, token);
            }
        }
    }
}
