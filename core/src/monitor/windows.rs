//! The receiver's window, as one place sees it (RFC 9293 section 3.8, RFC 7323 section 2).

/// One direction's window, which its receiver shows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Windows {
    /// The receiver's scale; `None` without its SYN.
    scale: Option<u8>,
    /// The sender's SYN offered scaling too; `None` without it.
    is_sender_scaled: Option<bool>,
    /// ACK plus window of the receiver's newest segment. Without its SYN this is not known.
    edge: Option<u64>,
    /// Segments of the receiver with a window of zero; no SYN, FIN or RST.
    pub zero: u64,
    /// Segments of the sender that end at the edge; no SYN, FIN or RST.
    pub full: u64,
}

impl Windows {
    /// The highest number that the receiver has room for, plus one; `None` if it is not known.
    #[must_use]
    pub(super) const fn edge(&self) -> Option<u64> {
        self.edge
    }

    /// The receiver's SYN, with its scale if it offers one.
    pub(super) fn on_syn(&mut self, scale: Option<u8>) {
        self.scale = Some(scale.unwrap_or(0).min(14));
    }

    /// The sender's SYN, which offers scaling or not.
    pub(super) fn on_sender_syn(&mut self, is_scaled: bool) {
        self.is_sender_scaled = Some(is_scaled);
    }

    /// A segment of the receiver.
    pub(super) fn on_shown(&mut self, ack: u64, window: u16, is_syn: bool, ends: bool) {
        self.zero += u64::from(window == 0 && !is_syn && !ends);
        // The window of a SYN is not scaled (RFC 7323 section 2.2).
        let is_plain = is_syn || self.is_sender_scaled == Some(false);
        let shift = self.scale.map(|scale| if is_plain { 0 } else { scale });
        self.edge = shift.map(|shift| ack + (u64::from(window) << shift));
    }

    /// A segment of the sender with data and neither SYN, FIN nor RST ends before `end`.
    pub(super) fn on_sent(&mut self, end: u64) {
        self.full += u64::from(self.edge.is_some_and(|edge| end >= edge));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_scaled_if_both_ends_offered_it_and_never_in_a_syn() {
        let mut w = Windows::default();
        w.on_shown(1000, 100, false, false);
        assert_eq!(w.edge(), None, "the scale is not known");
        w.on_syn(Some(3));
        w.on_shown(1000, 100, true, false);
        assert_eq!(w.edge(), Some(1100));
        w.on_shown(1000, 100, false, false);
        assert_eq!(w.edge(), Some(1800));
        w.on_sent(1799);
        w.on_sent(1800);
        assert_eq!(w.full, 1);
        w.on_sender_syn(false);
        w.on_shown(1000, 100, false, false);
        assert_eq!(w.edge(), Some(1100));
        w.on_shown(1000, 0, false, false);
        w.on_shown(1000, 0, false, true);
        assert_eq!(w.zero, 1);
    }
}
