//! When a sender may send: bursts, copies, repairs, and timeouts that double.

use nightporter_core::time::Instant;

use super::{BESIDES, Ensure, LATE, Repair, SHORT, Sending, Silence, TIMEOUT_LONG};

impl Repair {
    /// Bytes that may have left since.
    pub(super) fn most(&self, mss: u64) -> u64 {
        self.arrived + self.arrived.max(self.moves * mss) + BESIDES * mss
    }
}

impl Sending {
    /// A window of a path that is too short leaves as ACKs come, but not behind a pause, for then
    /// none are on their way (FLOOD-26).
    pub(super) fn note_burst(&mut self, at: Instant, len: u64, pauses: bool) {
        let before = self.sent_at.replace(at);
        if before == Some(at) {
            self.burst += len;
            return;
        }
        (self.burst, self.is_paced) = (len, !self.is_short() || pauses);
    }

    /// A round trip takes less time than a burst.
    pub(super) fn is_short(&self) -> bool {
        self.shortest.is_some_and(|took| took < SHORT)
    }

    pub(super) fn not_too_early(&self, at: Instant, from: u64, to: u64) -> Ensure {
        if self.is_found_lost(from) {
            return Ok(());
        }
        let pieces = self.pieces.range(from..to).filter(|(_, p)| !p.sacked);
        let spans = pieces.map(|(_, p)| at.since(p.at)).min().zip(self.shortest);
        match spans {
            Some((span, shortest)) if span.saturating_mul(2) < shortest => {
                let [span, shortest] = [span, shortest].map(|span| span.as_nanos() / 1000);
                Err(format!("again after {span} us, on a path of {shortest} us"))
            }
            _ => Ok(()),
        }
    }

    /// Without SACK an acknowledgement of a part of repaired bytes, or bytes still to be repaired,
    /// show that the next are lost (RFC 6582 section 3.2), whenever that left, but once. So do
    /// three duplicates, on a path that has become shorter, too.
    fn is_found_lost(&self, from: u64) -> bool {
        let repaired = self.pieces.get(&from).is_some_and(|p| p.copied && p.counts);
        let until = self.repair.map_or(0, |repair| repair.until).max(self.alarmed);
        let partial = from < until && self.duplicates == 0;
        !self.sack && from == self.una && (partial || self.duplicates >= 3) && !repaired
    }

    pub(super) fn backs_off(&mut self, at: Instant, from: u64) -> Ensure {
        if from != self.una {
            return Ok(());
        }
        let before = self.silence.filter(|s| s.first == from);
        let gap = before.map(|s| at.since(s.last));
        self.silence = Some(Silence { first: from, last: at, gap });
        let (Some(gap), Some(before)) = (gap, before.and_then(|s| s.gap)) else { return Ok(()) };
        let doubled = (gap + LATE).as_nanos() * 10 >= before.as_nanos() * 19;
        if doubled || gap >= TIMEOUT_LONG {
            return Ok(());
        }
        let [gap, before] = [gap, before].map(|span| span.as_millis());
        Err(format!("the same again after {gap} ms, and before that after {before} ms"))
    }

    /// `len` bytes leave; in a repair no more than arrivals have allowed.
    pub(super) fn follows_arrivals(&mut self, len: u64) -> Ensure {
        for repair in self.repair.iter_mut().chain(&mut self.doubted) {
            repair.sent += len;
        }
        let Some(repair) = self.repair else { return Ok(()) };
        let (sent, most) = (repair.sent, repair.most(self.mss));
        match sent <= most {
            true => Ok(()),
            false => Err(format!("{sent} bytes to R in a repair, {most} may leave")),
        }
    }
}
