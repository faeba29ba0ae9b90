//! Frames that may come out unchanged.

use super::{History, Side};

/// Frames remembered per direction that may still come out unchanged.
const UNCHANGED_MAX: usize = 1 << 17;
/// Frames remembered that came out unchanged.
const CAME_OUT_MAX: usize = 4;

impl History {
    /// Any frame that comes in now may come out unchanged.
    pub(crate) fn may_pass_any(&self) -> bool {
        // Frames behind the second FIN may find the flow gone.
        let is_over = self.ends.iter().all(|e| e.fin.is_some());
        !self.is_on() || self.offline || is_over
    }

    pub(super) fn may_pass(
        &mut self,
        from: Side,
        fingerprint: u64,
        counts: bool,
        in_any_state: bool,
    ) {
        self.end_mut(from).frames += 1;
        if self.may_pass_any() || in_any_state {
            let queue = &mut self.end_mut(from.other()).unchanged;
            if queue.len() == UNCHANGED_MAX {
                queue.pop_front();
            }
            queue.push_back((fingerprint, counts));
        }
    }

    /// A frame that came in goes out in pieces.
    pub(crate) fn on_cut(&mut self, to: Side, whole: u64, pieces: Vec<u64>) {
        let queue = &mut self.end_mut(to).unchanged;
        let Some(at) = queue.iter().position(|f| f.0 == whole) else { return };
        let later = queue.split_off(at + 1);
        let counts = queue.pop_back().is_some_and(|f| f.1);
        queue.extend(pieces.into_iter().map(|piece| (piece, counts)));
        queue.extend(later);
    }

    /// Whether the frame with this fingerprint came in and goes out unchanged, and if so whether it
    /// counts. Frames before it are lost then, because order is kept; except those that do not
    /// count, because the host may have made a frame like a later one.
    pub(crate) fn was_unchanged(&mut self, to: Side, fingerprint: u64) -> Option<bool> {
        let was_on = self.was_on;
        let end = self.end_mut(to);
        let Some(at) = end.unchanged.iter().position(|f| f.0 == fingerprint) else {
            return (was_on && end.came_out.contains(&fingerprint)).then_some(true);
        };
        if end.came_out.len() == CAME_OUT_MAX {
            end.came_out.pop_front();
        }
        end.came_out.push_back(fingerprint);
        if at == 0 {
            return end.unchanged.pop_front().map(|f| f.1);
        }
        let later = end.unchanged.split_off(at + 1);
        let found = end.unchanged.pop_back();
        end.unchanged.retain(|(_, counts)| !counts);
        end.unchanged.extend(later);
        found.map(|f| f.1)
    }
}
