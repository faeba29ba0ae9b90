//! The sender before G has accepted a connection: it has one number to send, that of R's SYN.

use crate::tcp::sender::Sender;

impl Sender {
    /// The sender of a connection of which G does not know. G has room for the SYN alone. `first`:
    /// R's first byte.
    pub(crate) fn opening(first: u64) -> Self {
        Self::new(first - 1, first)
    }

    /// The SYN is given to G.
    pub(crate) fn on_syn_given(&mut self) {
        self.next = self.edge;
        self.sent = self.edge;
    }

    /// It is to be given to it once more.
    pub(crate) fn repeat_syn(&mut self) {
        self.next = self.una;
    }
}
