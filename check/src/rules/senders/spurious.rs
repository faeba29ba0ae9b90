//! Whether a copy was for nothing (FLOOD-44).

use crate::wire::Seq;

use super::{Piece, RemoteAck, Sending};

impl Sending {
    /// R has the original of a copy, or something twice: the copy was for nothing.
    pub(super) fn is_late(&self, heard: &RemoteAck<'_>) -> bool {
        let RemoteAck { at, ack, blocks, .. } = *heard;
        let twice = match blocks {
            [(_, to), ..] if *to <= ack => true,
            [(from, to), (outer_from, outer_to), ..] => outer_from <= from && to <= outer_to,
            _ => false,
        };
        let early = |p: &Piece| self.shortest.is_some_and(|shortest| at < p.at + shortest);
        let older =
            |p: &Piece| heard.echo.zip(p.stamp).is_some_and(|(echo, own)| Seq(echo).lt(Seq(own)));
        let comes = |from: u64, end: u64| {
            end <= ack || blocks.iter().any(|&(left, right)| left <= from && end <= right)
        };
        let mut copied = self.pieces.iter().filter(|(_, p)| p.copied && !p.sacked);
        let original = copied
            .any(|(&from, p)| comes(from, p.end) && (early(p) || (from == self.una && older(p))));
        self.sack && twice || original
    }
}
