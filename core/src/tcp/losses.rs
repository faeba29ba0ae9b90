//! The losses that both pipes remember, and G's bytes that the outbound one keeps. They are in one
//! box, because most flows have none.

use crate::limits;
use crate::store::ranges::{InsertOutcome, Ranges};
use crate::tcp::outbound::RemoteSack;
use crate::tcp::outbound::relayed::{Before, Relayed};
use crate::tcp::sender::{Path, Recovery};
use crate::tcp::state::Heard;
use crate::time::Instant;
use crate::wire::saved::{BadImage, Reader, Saved, Writer, saved};
use crate::wire::translate::Translation;

/// State that is needed only while segments are missing.
#[derive(Debug, Default)]
pub(crate) struct Losses(Option<Box<Known>>);

impl Saved for Losses {
    fn saved(&self, image: &mut Writer) {
        self.0.saved(image);
    }

    fn of_saved(image: &mut Reader<'_>) -> Result<Self, BadImage> {
        Option::of_saved(image).map(Self)
    }
}

#[derive(Debug, Default)]
struct Known {
    /// Of bytes that G has not got.
    guest: Recovery,
    /// The way to those.
    path: Option<Box<Path>>,
    /// The way behind G takes shorter segments than G itself.
    narrow: Option<Narrow>,
    /// So does the way to R.
    narrow_to_net: Option<Narrow>,
    /// Of bytes of G that R has not got.
    net: RemoteSack,
    /// The bytes of G that are kept, with congestion offload.
    relayed: Option<Box<Relayed>>,
    /// End of the bytes that G had sent H when H let go of the flow, if R was not sent all of them
    /// yet.
    unsent: u64,
    /// The path's state for the next sender, while there is none.
    before: Option<Box<Before>>,
    /// The right edge that G was shown by a box that has gone, if R did not show it.
    promised: u64,
    /// The SACK blocks that R was sent and G has not acknowledged, while R's bytes are acknowledged
    /// late.
    sacked: Ranges,
    /// Data segments of G in a row that came from farther than its handshake.
    farther: u8,
    /// R may have sent G bytes below this past the daemon, while it was away.
    past: u64,
    /// Copies of G that found R's window shut although G was shown some.
    vain: u8,
    /// The differences between G's numbers and R's, if H has answered R's SYN.
    translated: Option<Translated>,
}

saved! {
    Known {
        guest, path, narrow, narrow_to_net, net, unsent, before, promised, sacked, farther, vain,
        translated,
    }
    reset {
        relayed = None, // handed back before (FLOOD-32)
        past = 0, // a VM whose frames can pass has no image
    }
    check |it| it.vain < limits::WINDOW_PROBES_MAX
}

/// G has accepted a connection whose SYN H had answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Translated {
    /// Between G's numbers and R's.
    pub(crate) numbers: Translation,
    /// Times that both ends were asked whether they are there, since each was heard (ACC-08).
    pub(crate) asked: u8,
    /// G was heard since they were asked first, and R was.
    pub(crate) heard: Heard,
}

impl Translated {
    /// G has a new ring, and may have booted: both ends are asked when they have been silent for a
    /// little (ACC-08).
    pub(crate) fn ask_soon(&mut self) {
        self.asked = self.asked.max(1);
        self.heard = Heard::default();
    }
}

saved! {
    Translated { numbers, asked }
    reset {
        heard = Heard::default(), // both are asked anew
    }
}

/// Segments for an end are shorter, for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Narrow {
    /// Payload bytes of a segment before.
    pub(crate) mss_before: u16,
    /// Until then.
    pub(crate) until: Instant,
}

saved! {
    Narrow { mss_before, until as Wall }
    check |it| it.mss_before >= limits::PAYLOAD_MIN
}

/// Memory of an idle flow for which H has sent.
const _: () = assert!(size_of::<Known>() + size_of::<Before>() <= limits::SENDER_MEMORY_BYTES);

impl Losses {
    /// There is something to know.
    #[inline]
    pub(crate) const fn any(&self) -> bool {
        self.0.is_some()
    }

    /// G's bytes that are kept.
    #[inline]
    pub(crate) fn relayed(&self) -> Option<&Relayed> {
        self.0.as_ref()?.relayed.as_deref()
    }

    pub(crate) fn relayed_mut(&mut self) -> Option<&mut Relayed> {
        self.0.as_mut()?.relayed.as_deref_mut()
    }

    pub(crate) fn begin_relayed(&mut self, relayed: Relayed) {
        let known = self.0.get_or_insert_default();
        known.relayed = Some(Box::new(relayed));
        (known.unsent, known.promised, known.vain) = (0, 0, 0); // it knows
    }

    pub(crate) fn take_relayed(&mut self) -> Option<Box<Relayed>> {
        self.0.as_mut()?.relayed.take()
    }

    /// The state that the present or last sender for G has learned.
    pub(crate) fn take_before(&mut self) -> Option<Box<Before>> {
        let known = self.0.as_mut()?;
        let before = known.relayed.as_deref().map(|relayed| Box::new(relayed.before()));
        before.or_else(|| known.before.take())
    }

    /// It is for the next one.
    pub(crate) fn note_before(&mut self, before: Option<Box<Before>>) {
        if before.is_some() {
            self.0.get_or_insert_default().before = before;
        }
    }

    /// H lets go of the flow, or has, and R was not sent all bytes below `end` that G has sent H.
    pub(crate) fn note_unsent(&mut self, end: u64) {
        let known = self.0.get_or_insert_default();
        known.unsent = known.unsent.max(end);
    }

    /// End of the bytes that G has sent H; R was perhaps not sent all of them.
    pub(crate) fn unsent(&self) -> u64 {
        self.0.as_ref().map_or(0, |known| known.unsent)
    }

    /// The same, also while H sends for G: end of the bytes that G has sent, whether H took them or
    /// not.
    pub(crate) fn shown(&self) -> u64 {
        self.unsent().max(self.relayed().map_or(0, Relayed::shown))
    }

    /// The box of a flow goes, and G was shown room up to `edge`, more than R shows.
    pub(crate) fn note_promised(&mut self, edge: u64) {
        self.0.get_or_insert_default().promised = edge;
    }

    /// G was shown room up to here, while H sends for it or before.
    pub(crate) fn promised(&self) -> u64 {
        let before = self.0.as_ref().map_or(0, |known| known.promised);
        before.max(self.relayed().map_or(0, Relayed::promised))
    }

    /// A box that has gone showed G room, and G has used it up to here; R was not sent all of that.
    /// G is shown it still (INV-05).
    #[inline]
    pub(crate) fn used(&self) -> u64 {
        self.0.as_ref().map_or(0, |known| known.unsent.min(known.promised))
    }

    /// G sends the first byte that R does not have; `in_vain`: R has no room for it. `true`: this
    /// was so the last times too, and G has to know: it would soon give up if it took R's window
    /// for open (FLOOD-12).
    pub(crate) fn on_asked(&mut self, in_vain: bool) -> bool {
        let Some(known) = self.0.as_mut() else { return false };
        known.vain = if in_vain { known.vain + 1 } else { 0 };
        let is_over = known.vain >= limits::WINDOW_PROBES_MAX;
        if is_over {
            (known.promised, known.vain) = (0, 0);
        }
        is_over
    }

    /// R was sent everything below `sent`; G has everything below `guest_una`.
    pub(crate) fn on_sent(&mut self, sent: u64, guest_una: u64) {
        let Some(known) = self.0.as_mut() else { return };
        if known.unsent <= sent {
            known.unsent = 0;
        }
        if known.promised <= sent {
            (known.promised, known.vain) = (0, 0);
        }
        self.forget(guest_una);
    }

    /// R was sent a SACK block, and is acknowledged late. Of more blocks than there is room for,
    /// those from the lowest to the highest count as one, and R waits where it need not.
    pub(crate) fn note_sacked(&mut self, from: u64, end: u64) {
        let sacked = &mut self.0.get_or_insert_default().sacked;
        if sacked.insert(from, end) == InsertOutcome::Full {
            let lowest = sacked.iter().next().map_or(from, |(lowest, _)| lowest.min(from));
            sacked.insert(lowest, sacked.max_end().map_or(end, |highest| highest.max(end)));
        }
    }

    /// R has waited for the acknowledgement of what it was SACKed long enough.
    pub(crate) fn forget_sacked(&mut self) {
        self.forget_sacked_below(u64::MAX);
    }

    /// G has acknowledged everything below `una`.
    pub(crate) fn forget_sacked_below(&mut self, una: u64) {
        if let Some(known) = self.0.as_mut() {
            known.sacked.remove_below(una);
        }
    }

    /// `seq` lies in a SACK block that R was sent.
    pub(crate) fn is_sacked(&self, seq: u64) -> bool {
        self.0.as_ref().is_some_and(|known| known.sacked.contiguous_from(seq) > seq)
    }

    /// End of the highest SACK block that R was sent, if G has not acknowledged it; else 0.
    pub(crate) fn sacked_end(&self) -> u64 {
        self.0.as_ref().and_then(|known| known.sacked.max_end()).unwrap_or(0)
    }

    /// R may have sent G bytes below `end` past the daemon.
    pub(crate) fn note_past(&mut self, end: u64) {
        self.0.get_or_insert_default().past = end;
    }

    /// G may acknowledge bytes below this that H has not given it, and both sides may name numbers
    /// that H did not see; until G has acknowledged them all. Else 0.
    #[inline]
    pub(crate) fn past(&self) -> u64 {
        self.0.as_ref().map_or(0, |known| known.past)
    }

    /// The bytes that G lacks.
    #[inline]
    pub(crate) fn of_guest(&self) -> Option<&Recovery> {
        self.0.as_ref().map(|known| &known.guest)
    }

    pub(crate) fn of_guest_mut(&mut self) -> Option<&mut Recovery> {
        self.0.as_mut().map(|known| &mut known.guest)
    }

    pub(crate) fn of_guest_or_new(&mut self) -> &mut Recovery {
        &mut self.0.get_or_insert_default().guest
    }

    /// The way of bytes to G, if some were lost on it lately.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.0.as_ref()?.path.as_deref()
    }

    pub(crate) fn path_mut(&mut self) -> Option<&mut Path> {
        self.0.as_mut()?.path.as_deref_mut()
    }

    /// It is known to be such a one.
    pub(crate) fn begin_path(&mut self, path: Path) {
        self.0.get_or_insert_default().path = Some(Box::new(path));
    }

    /// `true`: nothing was known of it.
    pub(crate) fn path_or_new(&mut self, running: Instant, mss: u64) -> (&mut Path, bool) {
        let path = &mut self.0.get_or_insert_default().path;
        let is_new = path.is_none();
        (path.get_or_insert_with(|| Box::new(Path::new(running, mss))), is_new)
    }

    /// That way, and the bytes that were lost on it.
    pub(crate) fn path_and_guest(&self) -> Option<(&Path, &Recovery)> {
        let known = self.0.as_ref()?;
        Some((known.path.as_deref()?, &known.guest))
    }

    /// As [`Self::path_and_guest`].
    pub(crate) fn path_and_guest_mut(&mut self) -> Option<(&mut Path, &mut Recovery)> {
        let known = self.0.as_mut()?;
        Some((known.path.as_deref_mut()?, &mut known.guest))
    }

    /// Nothing was lost on that way for long, or it is another one.
    pub(crate) fn forget_path(&mut self) {
        if let Some(known) = self.0.as_mut() {
            (known.path, known.guest) = (None, Recovery::default());
        }
    }

    /// Whether the last data segment of G came from farther than its handshake.
    #[inline(always)]
    pub(crate) fn any_farther(&self) -> bool {
        self.0.as_ref().is_some_and(|known| known.farther > 0)
    }

    /// A data segment of G came from farther than its handshake, or did not: how many in a row did.
    pub(crate) fn note_farther(&mut self, is_farther: bool) -> u8 {
        if !is_farther && self.0.is_none() {
            return 0;
        }
        let farther = &mut self.0.get_or_insert_default().farther;
        *farther = if is_farther { farther.saturating_add(1) } else { 0 };
        *farther
    }

    /// Segments for G are shorter for a while.
    pub(crate) fn narrow(&self) -> Option<Narrow> {
        self.0.as_ref()?.narrow
    }

    pub(crate) fn set_narrow(&mut self, narrow: Option<Narrow>) {
        if narrow.is_some() || self.any() {
            self.0.get_or_insert_default().narrow = narrow;
        }
    }

    /// Segments for R are shorter for a while.
    pub(crate) fn narrow_to_net(&self) -> Option<Narrow> {
        self.0.as_ref()?.narrow_to_net
    }

    pub(crate) fn set_narrow_to_net(&mut self, narrow: Option<Narrow>) {
        if narrow.is_some() || self.any() {
            self.0.get_or_insert_default().narrow_to_net = narrow;
        }
    }

    /// The bytes that R lacks.
    #[inline]
    pub(crate) fn of_net(&self) -> Option<&RemoteSack> {
        self.0.as_ref().map(|known| &known.net)
    }

    pub(crate) fn of_net_mut(&mut self) -> Option<&mut RemoteSack> {
        self.0.as_mut().map(|known| &mut known.net)
    }

    pub(crate) fn of_net_or_new(&mut self) -> &mut RemoteSack {
        &mut self.0.get_or_insert_default().net
    }

    /// G can have lost this of the bytes from `una` to `sent`, for an image.
    pub(crate) fn is_possible(&self, una: u64, sent: u64) -> bool {
        self.0.as_ref().is_none_or(|known| {
            let path = known.path.as_ref();
            known.guest.is_below(sent) && path.is_none_or(|path| path.is_possible(una, sent))
        })
    }

    /// Without losses there is nothing to remember of them; G has everything below `guest_una`.
    pub(crate) fn forget(&mut self, guest_una: u64) {
        let over = |known: &Known| {
            known.guest.is_over(guest_una)
                && known.path.is_none()
                && known.narrow.is_none()
                && known.narrow_to_net.is_none()
                && known.farther == 0
                && known.net.is_over()
                && known.relayed.is_none()
                && known.unsent == 0
                && known.before.is_none()
                && known.promised == 0
                && known.past <= guest_una
                && known.sacked.max_end().is_none_or(|end| end <= guest_una)
                && known.translated.is_none()
        };
        if self.0.as_deref().is_some_and(over) {
            self.0 = None;
        }
    }

    /// The flow leaves the path. Kept bytes were given back before. G's numbers stay what they are.
    pub(crate) fn clear(&mut self) {
        let translated = self.0.take().and_then(|known| known.translated);
        if translated.is_some() {
            self.0 = Some(Box::new(Known { translated, ..Known::default() }));
        }
    }

    /// The differences between G's numbers and R's, if there are any.
    pub(crate) fn translated(&self) -> Option<&Translated> {
        self.0.as_ref()?.translated.as_ref()
    }

    pub(crate) fn translated_mut(&mut self) -> Option<&mut Translated> {
        self.0.as_mut()?.translated.as_mut()
    }

    /// G has accepted the connection, and these are its numbers.
    pub(crate) fn set_translated(&mut self, numbers: Translation) {
        let translated = Translated { numbers, asked: 0, heard: Heard::default() };
        self.0.get_or_insert_default().translated = Some(translated);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn life_13_more_blocks_than_there_is_room_for_count_as_one() {
        let most = u64::try_from(limits::OOO_RANGES_MAX).unwrap();
        let mut losses = Losses::default();
        for n in 1..=most {
            losses.note_sacked(100 * n, 100 * n + 50);
        }
        assert!(losses.is_sacked(149) && !losses.is_sacked(150) && !losses.is_sacked(99));
        losses.forget_sacked_below(120);
        losses.note_sacked(100 * most + 60, 100 * most + 70);
        assert!(losses.is_sacked(150), "more than there is room for");
        assert!(!losses.is_sacked(119) && losses.is_sacked(120));
        assert_eq!(losses.sacked_end(), 100 * most + 70);
        losses.forget_sacked_below(losses.sacked_end());
        assert_eq!(losses.sacked_end(), 0);
        losses.forget(0);
        assert!(!losses.any());
    }
}
