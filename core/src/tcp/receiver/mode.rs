//! The mode of a receiver, late or early (LIFE-12), and what else is unusual about it.

use crate::tcp::receiver::Receiver;
use crate::wire::saved::{BadImage, Reader, Saved, Writer};

/// Unusual states of a receiver, one bit each, so that one look sees whether there is any.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Odd(u16);

impl Saved for Odd {
    fn saved(&self, image: &mut Writer) {
        self.0.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        u16::of_saved(image).map(Self)
    }
}

impl Odd {
    /// R's keepalive or SYN was passed to G; its answer triggers H's ACK (SNOOP-17, SNOOP-36).
    pub(super) const ANSWER_AWAITED: u16 = 1;
    /// A valid RST of R waits behind the store (SNOOP-15).
    pub(super) const RESET_WAITS: u16 = 2;
    /// R's bytes are acknowledged late (LIFE-12).
    pub(super) const LATE: u16 = 4;
    /// G's driver has begun anew, and G may not know the connection any more (LIFE-04b).
    pub(super) const DOUBTED: u16 = 8;
    /// The buffer has room for more bytes than may be acknowledged early (FWD-02).
    pub(super) const WIDE: u16 = 16;
    /// It goes on after a kill, and the last ACK to R has perhaps not left (LIFE-09).
    pub(super) const ANEW: u16 = 32;
    /// Frames have passed the daemon by, and G is asked what it has (LIFE-17).
    pub(super) const ASKING: u16 = 64;
    /// The clock that G's answer echoes has to prove that it is about the same numbers.
    pub(super) const BY_CLOCK: u16 = 128;
    /// H has answered R's SYN, so G's numbers are others than R's (ACC-04).
    pub(super) const TRANSLATED: u16 = 256;
    /// G has yet to accept the connection, so R gets no more room (ACC-10).
    pub(super) const OPENING: u16 = 512;

    pub(super) const fn has(self, any: u16) -> bool {
        self.0 & any != 0
    }

    pub(super) fn set(&mut self, bit: u16, on: bool) {
        self.0 = if on { self.0 | bit } else { self.0 & !bit };
    }
}

impl Receiver {
    /// It acknowledges late: R's bytes once G has acknowledged them (LIFE-12).
    #[inline]
    pub(crate) const fn is_late(&self) -> bool {
        self.odd.has(Odd::LATE)
    }

    /// It has no place for bytes of R.
    #[inline]
    pub(crate) const fn is_parked(&self) -> bool {
        self.reserved_pages == 0
    }

    /// H has answered R's SYN: G's numbers are others than R's, for life (ACC-04).
    #[inline]
    pub(crate) const fn is_translated(&self) -> bool {
        self.odd.has(Odd::TRANSLATED)
    }

    /// H has answered R's SYN, and G has yet to accept the connection.
    pub(crate) fn begin_opening(&mut self) {
        self.odd.set(Odd::TRANSLATED | Odd::OPENING, true);
    }

    /// G has accepted it.
    pub(crate) fn end_opening(&mut self) {
        self.odd.set(Odd::OPENING, false);
    }

    /// It was such a one when its predecessor ended.
    pub(crate) fn set_translated(&mut self) {
        self.odd.set(Odd::TRANSLATED, true);
    }

    /// G may not know the connection any more (LIFE-04b).
    #[inline]
    pub(crate) const fn is_doubted(&self) -> bool {
        self.odd.has(Odd::DOUBTED)
    }

    /// G may not know the connection any more, or is known to.
    pub(crate) fn set_doubted(&mut self, doubted: bool) {
        self.odd.set(Odd::DOUBTED, doubted);
    }

    /// It goes on after a kill.
    pub(crate) fn set_anew(&mut self) {
        self.odd.set(Odd::ANEW, true);
    }

    /// It goes on after a kill, and nobody has spoken since.
    pub(crate) const fn is_anew(&self) -> bool {
        self.odd.has(Odd::ANEW)
    }

    /// G is asked what it has (LIFE-17).
    #[inline]
    pub(crate) const fn is_asking(&self) -> bool {
        self.odd.has(Odd::ASKING)
    }

    /// The clock that its answer echoes has to prove that it is about the same numbers.
    pub(crate) const fn asks_by_clock(&self) -> bool {
        self.odd.has(Odd::BY_CLOCK)
    }

    /// G is asked. `by_clock`: see [`Self::asks_by_clock`].
    pub(crate) fn ask(&mut self, by_clock: bool) {
        self.odd.set(Odd::ASKING, true);
        self.odd.set(Odd::BY_CLOCK, by_clock);
    }

    /// G has said what it has.
    pub(crate) fn on_told(&mut self) {
        self.odd.set(Odd::ASKING | Odd::BY_CLOCK, false);
    }

    /// G speaks for the first time since the kill, if there was one.
    pub(crate) fn take_anew(&mut self) -> bool {
        let anew = self.odd.has(Odd::ANEW);
        self.odd.set(Odd::ANEW, false);
        anew
    }

    /// All that it holds may be acknowledged early, no RST of R waits, and nobody waits for an
    /// answer of G.
    #[inline(always)]
    pub(crate) const fn is_plain(&self) -> bool {
        self.odd.0 == 0
    }

    /// There is room for more bytes than may be acknowledged early (FWD-02).
    #[inline]
    pub(crate) const fn is_wide(&self) -> bool {
        self.odd.has(Odd::WIDE)
    }

    /// More of these are held than `most`.
    #[inline]
    pub(crate) const fn holds_more(&self, una: u64, most: u64) -> bool {
        self.is_wide() && self.next > una + most
    }

    /// It acknowledges late, or an RST of R waits.
    #[inline(always)]
    pub(crate) const fn makes_no_promise(&self) -> bool {
        self.odd.has(Odd::LATE | Odd::RESET_WAITS)
    }

    /// The acknowledgement number in the late mode; `una`: that of G, R's FIN counted; `is_sacked`:
    /// it lies in a SACK block that R was sent.
    ///
    /// R takes an ACK inside a SACK block for a sign that the block was dropped
    /// (`tcp_check_sack_reneging` of Linux 6.18), so the number moves over a block at once.
    pub(crate) fn late_ack(&self, una: u64, is_sacked: bool) -> u64 {
        let inside = una < self.next && is_sacked;
        if inside { self.acks.sent() } else { una.max(self.acks.sent()) }
    }

    /// It acknowledges late from now on, or early.
    pub(crate) fn set_late(&mut self, late: bool) {
        self.odd.set(Odd::LATE, late);
        // R fills the window of G now, or the one before; but that of a container stays.
        self.filled &= self.is_wide();
    }

    /// A valid RST of R. `false`: one waits already.
    pub(crate) fn on_reset(&mut self) -> bool {
        let waits = self.reset_waits();
        self.odd.set(Odd::RESET_WAITS, true);
        !waits
    }

    /// R asks something that G itself answers; or nothing is awaited any more.
    pub(crate) fn await_answer(&mut self, awaited: bool) {
        self.odd.set(Odd::ANSWER_AWAITED, awaited);
    }

    /// R waits for G's answer.
    #[inline]
    pub(crate) const fn is_answer_awaited(&self) -> bool {
        self.odd.has(Odd::ANSWER_AWAITED)
    }

    /// G has answered. Whether R waits for that.
    #[must_use]
    pub(crate) fn on_answer(&mut self) -> bool {
        let awaited = self.is_answer_awaited();
        self.odd.set(Odd::ANSWER_AWAITED, false);
        awaited
    }
}
