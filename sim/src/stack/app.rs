//! The applications, written once against any TCP.
//!
//! Theory of operation: an [`App`] is one end of one connection. [`App::run`] is called after any
//! event that may have changed the possibilities of its [`Socket`]. It reads all bytes, writes as
//! many as it may, and closes when its part is done. It waits only for bytes, for the other's
//! close, and (one workload) for a time. TCP ensures that it always ends: keepalives every
//! [`KEEPALIVE`], and a connection without progress for [`USER_TIMEOUT`] is reset.

use nightporter_core::time::{Duration, Instant};

use super::{ConnId, EndReport, Outcome};
use crate::plan::{ConnPlan, Machine, Workload};
use nightporter_check::stream::Stream;

/// A connection without traffic for so long asks whether the other is still there.
pub const KEEPALIVE: Duration = Duration::from_secs(20);

/// A connection whose other end is silent, or acknowledges nothing, for so long is reset. Longer
/// than smoltcp's longest retransmission timeout, which is a minute.
pub const USER_TIMEOUT: Duration = Duration::from_secs(150);

/// The bytes that [`Workload::Idle`] writes before and after its silence.
const LITTLE: u64 = 100;
/// And after one of days: enough for somebody to come between.
const AFTER_SLEEP: u64 = 60_000;

/// How far a TCP connection is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Phase {
    /// The handshake is not over.
    Opening,
    /// Bytes flow, in one direction at least.
    Open,
    /// Both FINs are through.
    Closed,
    /// It was reset, by whichever end.
    Reset,
}

/// The socket interface of an application.
///
/// Streams are not handed over as bytes but by name ([`Stream`]): a stack with a buffer fills it,
/// and one without compares on arrival.
pub trait Socket {
    /// How far it is.
    fn phase(&self) -> Phase;

    /// Takes over at most `len` bytes of `stream` from offset `at` on; returns how many.
    fn send(&mut self, stream: Stream, at: u64, len: u64) -> u64;

    /// Gives away all bytes that arrived in order, also after the connection is over. They should
    /// be those of `expected` from offset `at` on. Without `reading` it keeps them, unless it
    /// would lose them.
    fn recv(&mut self, expected: Stream, at: u64, reading: bool) -> Received;

    /// The other end has closed, and all it wrote was read.
    fn finished(&self) -> bool;

    /// Bytes taken by [`Self::send`] that are not acknowledged.
    fn unacknowledged(&self) -> u64;

    /// Nothing more will be written.
    fn close(&mut self);

    /// The connection is reset.
    fn abort(&mut self);
}

/// The result of [`Socket::recv`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Received {
    /// Bytes.
    pub bytes: u64,
    /// Offset in the stream of the first wrong byte.
    pub wrong_at: Option<u64>,
}

/// One end of one connection.
#[derive(Debug)]
pub struct App {
    workload: Workload,
    is_client: bool,
    to_read: u64,
    has_closed: bool,
    /// End of the silence of [`Workload::Idle`].
    wakes_at: Option<Instant>,
    report: EndReport,
}

impl App {
    /// The end of connection `id` that runs on `machine`.
    #[must_use]
    pub fn new(id: ConnId, plan: &ConnPlan, machine: Machine) -> Self {
        let is_client = plan.client == machine;
        let workload = plan.workload.sane();
        let [up, down] = workload.bytes();
        let (to_write, to_read) = if is_client { (up, down) } else { (down, up) };
        let report = EndReport {
            conn: id,
            machine,
            written: 0,
            to_write,
            read: 0,
            wrong_at: None,
            opened_at: None,
            connected_at: None,
            acked_at: None,
            delivered_at: None,
            outcome: Outcome::Waiting,
            over_at: None,
        };
        Self { workload, is_client, to_read, has_closed: false, wakes_at: None, report }
    }

    /// How far it is.
    #[must_use]
    pub const fn report(&self) -> &EndReport {
        &self.report
    }

    /// Nothing will change any more.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(self.report.outcome, Outcome::Closed | Outcome::Reset)
    }

    /// It sends the SYN.
    #[must_use]
    pub const fn is_client(&self) -> bool {
        self.is_client
    }

    /// The stream that this end reads.
    #[must_use]
    pub fn expected(&self) -> Stream {
        Stream::of(self.report.conn, !self.is_client)
    }

    /// The SYN leaves, or has come.
    pub fn opens(&mut self, now: Instant) {
        self.report.opened_at = Some(now);
        self.report.outcome = Outcome::Open;
    }

    /// When it wants to run although nothing has happened.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<Instant> {
        self.wakes_at
    }

    /// Reads, writes and closes.
    pub fn run(&mut self, now: Instant, socket: &mut impl Socket, reading: bool) {
        let phase = socket.phase();
        if self.is_over() || phase == Phase::Opening {
            return;
        }
        if phase != Phase::Reset {
            self.report.connected_at.get_or_insert(now);
        }
        self.read(now, socket, reading);
        if phase == Phase::Open {
            self.write(now, socket);
        }
        if self.report.to_write > 0 && self.is_acknowledged(socket) {
            self.report.acked_at.get_or_insert(now);
        }
        match phase {
            Phase::Closed => self.report.outcome = Outcome::Closed,
            // An RST for a FIN that came again long after does not concern the application.
            Phase::Reset
                if self.has_closed && socket.finished() && self.is_acknowledged(socket) =>
            {
                self.report.outcome = Outcome::Closed;
            }
            Phase::Reset => self.report.outcome = Outcome::Reset,
            Phase::Opening | Phase::Open => {}
        }
        if self.is_over() {
            self.report.over_at = Some(now);
            self.wakes_at = None;
        }
    }

    /// Everything it wants to write is acknowledged.
    fn is_acknowledged(&self, socket: &impl Socket) -> bool {
        self.report.written == self.report.to_write && socket.unacknowledged() == 0
    }

    fn read(&mut self, now: Instant, socket: &mut impl Socket, reading: bool) {
        let got = socket.recv(self.expected(), self.report.read, reading);
        self.report.read += got.bytes;
        self.report.wrong_at = self.report.wrong_at.or(got.wrong_at);
        let all = self.to_read > 0 && self.report.read >= self.to_read;
        if all && self.report.delivered_at.is_none() {
            self.report.delivered_at = Some(now);
        }
    }

    fn write(&mut self, now: Instant, socket: &mut impl Socket) {
        let finished = socket.finished();
        let allowed = self.may_have_written(now, finished).min(self.report.to_write);
        if self.report.written < allowed && !self.has_closed {
            let stream = Stream::of(self.report.conn, self.is_client);
            let at = self.report.written;
            self.report.written += socket.send(stream, at, allowed - at);
        }
        let all = self.report.written == self.report.to_write && socket.unacknowledged() == 0;
        if matches!(self.workload, Workload::Reset { .. }) && self.is_client && all {
            socket.abort();
            return;
        }
        if !self.has_closed && self.may_close(finished) {
            self.has_closed = true;
            socket.close();
        }
    }

    /// Bytes that may be written by now, from the first on.
    fn may_have_written(&mut self, now: Instant, finished: bool) -> u64 {
        let (read, client) = (self.report.read, self.is_client);
        match self.workload {
            Workload::Bulk { .. } | Workload::Reset { .. } => u64::MAX,
            Workload::RequestResponse { request, response, .. } if client => {
                (read / response + 1) * request
            }
            Workload::RequestResponse { request, response, .. } => read / request * response,
            Workload::HalfClose { .. } => {
                if client || finished {
                    u64::MAX
                } else {
                    0
                }
            }
            Workload::Idle { .. } if !client => read,
            Workload::Idle { idle_s } => {
                if read >= LITTLE && self.wakes_at.is_none() && self.report.written == LITTLE {
                    self.wakes_at = Some(now + Duration::from_secs(idle_s.into()));
                }
                let awake = self.wakes_at.is_some_and(|at| now >= at);
                if awake {
                    self.wakes_at = None;
                }
                if awake || self.report.written > LITTLE { u64::MAX } else { LITTLE }
            }
        }
    }

    /// Its part is done, or the other end is gone before its own was.
    fn may_close(&self, finished: bool) -> bool {
        let written = self.report.written == self.report.to_write;
        match self.workload {
            Workload::Bulk { .. } => written,
            Workload::Reset { .. } => finished,
            Workload::HalfClose { .. } => written && (self.is_client || finished),
            Workload::RequestResponse { .. } | Workload::Idle { .. } => {
                finished || self.is_client && written && self.report.read >= self.to_read
            }
        }
    }
}

impl Workload {
    /// Without requests or responses of nothing, which could not be told apart.
    fn sane(self) -> Self {
        match self {
            Self::RequestResponse { request, response, count } => {
                Self::RequestResponse { request: request.max(1), response: response.max(1), count }
            }
            other => other,
        }
    }

    /// Silent for so long that keepalives would be all there is to it.
    #[must_use]
    pub const fn is_patient(self) -> bool {
        matches!(self, Self::Idle { idle_s } if idle_s > 86_400)
    }

    /// Bytes from client to server and back.
    #[must_use]
    pub fn bytes(self) -> [u64; 2] {
        match self {
            Self::Bulk { up, down } | Self::HalfClose { up, down } => [up, down],
            Self::RequestResponse { request, response, count } => {
                [request.max(1) * u64::from(count), response.max(1) * u64::from(count)]
            }
            Self::Reset { up } => [up, 0],
            Self::Idle { .. } if self.is_patient() => [LITTLE + AFTER_SLEEP; 2],
            Self::Idle { .. } => [2 * LITTLE; 2],
        }
    }
}
