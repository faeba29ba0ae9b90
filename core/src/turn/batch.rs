//! Frames of one port that were read and not yet processed.

use std::ops::Range;

use crate::engine::{Engine, Staged};
use crate::limits::{BATCH_BYTES, BATCH_FRAMES, FRAME_BYTES_MAX};
use crate::port::PortId;
use crate::time::Instant;
use crate::wire::virtio_net::VirtioNetHdr;

/// At most [`BATCH_FRAMES`], and about [`BATCH_BYTES`], in one buffer. The default has no room.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Box<[u8]>,
    frames: Vec<(VirtioNetHdr, Range<usize>)>,
    staged: Vec<Staged>,
}

/// A frame of a batch.
pub(super) struct Read<'a> {
    pub(super) hdr: VirtioNetHdr,
    pub(super) bytes: &'a mut [u8],
    pub(super) staged: &'a Staged,
}

impl Batch {
    /// Without frames.
    pub(super) fn new() -> Self {
        Self {
            // Frames begin below `BATCH_BYTES`.
            bytes: vec![0; BATCH_BYTES + FRAME_BYTES_MAX].into_boxed_slice(),
            frames: Vec::with_capacity(BATCH_FRAMES),
            staged: Vec::with_capacity(BATCH_FRAMES),
        }
    }

    /// How many frames there are.
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// Room for the next of at most `frames_max` frames; `None`: the batch is full.
    pub(super) fn room(&mut self, frames_max: usize) -> Option<&mut [u8]> {
        let at = self.end();
        let full = self.frames.len() >= frames_max || at >= BATCH_BYTES;
        (!full).then(|| &mut self.bytes[at..at + FRAME_BYTES_MAX])
    }

    /// A frame of `len` bytes was read into [`Self::room`].
    pub(super) fn push(&mut self, hdr: VirtioNetHdr, len: usize) {
        let at = self.end();
        self.frames.push((hdr, at..at + len));
    }

    /// The frame in place `i`.
    pub(super) fn read(&mut self, i: usize) -> Read<'_> {
        let (hdr, at) = self.frames[i].clone();
        Read { hdr, bytes: &mut self.bytes[at], staged: &self.staged[i] }
    }

    /// The engine looks through all frames, which came in on `port`.
    pub(super) fn stage(&mut self, now: Instant, engine: &Engine<'_>, port: PortId) {
        let frames = self.frames.iter().map(|(_, at)| &self.bytes[at.clone()]);
        self.staged.extend(frames.map(|frame| engine.stage(now, port, frame)));
        engine.fetch(&mut self.staged);
    }

    /// Forgets all frames.
    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.staged.clear();
    }

    fn end(&self) -> usize {
        self.frames.last().map_or(0, |(_, at)| at.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_full_by_its_frames_or_by_its_bytes() {
        let mut batch = Batch::new();
        batch.push(VirtioNetHdr::default(), 60);
        assert!(batch.room(1).is_none() && batch.room(2).is_some());
        batch.push(VirtioNetHdr::default(), BATCH_BYTES - 60);
        assert!(batch.room(BATCH_FRAMES).is_none());
    }
}
