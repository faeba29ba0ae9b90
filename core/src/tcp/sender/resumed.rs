//! The sender of a flow that a predecessor's record speaks of (LIFE-09).

use crate::tcp::sender::Sender;

impl Sender {
    /// The sender that a predecessor's record speaks of: G has taken bytes below `una`, and was
    /// handed those below `sent`.
    pub(crate) fn recovered(una: u64, sent: u64) -> Self {
        Self { next: sent, sent, ..Self::new(una, sent) }
    }

    /// The same that goes on: all that G has not acknowledged is given to it again, inside the
    /// window that it had shown for it. If that is nothing G is asked, because its window is not
    /// known.
    pub(crate) fn resumed(una: u64, sent: u64) -> Self {
        Self { sent, established: true, probe_due: sent == una, ..Self::new(una, sent) }
    }

    /// The same to a G that has taken all, and has shown room up to `edge`.
    pub(crate) fn resumed_idle(una: u64, edge: u64) -> Self {
        Self { established: true, ..Self::new(una, edge) }
    }

    /// The same to a G that has sent nothing but its SYN-ACK. It is asked by data: they complete
    /// the handshake if R's third ACK was lost, and a probe below them would not (SYN cookies,
    /// COM-29). A segment of `mss` bytes that it does not take is answered, too.
    pub(crate) fn resumed_new(una: u64, sent: u64, mss: u64) -> Self {
        Self { sent, ..Self::new(una, sent.max(una + mss)) }
    }
}
