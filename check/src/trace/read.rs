//! Two captures as one sequence of frames.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use nightporter_core::time::Instant;
use pcap_file::pcap::PcapReader;
use pcap_file::{DataLink, PcapError};

use super::{Options, sender};
use crate::history::Side;

/// A frame of one of the captures.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) at: Instant,
    /// At the uplink (R) or at the guest's port (G).
    pub(super) side: Side,
    pub(super) bytes: Vec<u8>,
}

/// One capture, read as it is needed.
pub(super) struct Frames<'r> {
    name: &'static str,
    side: Side,
    reader: PcapReader<Box<dyn Read + 'r>>,
    whole: bool,
    count: u64,
    latest: Instant,
    next: Option<Frame>,
}

impl<'r> Frames<'r> {
    pub(super) fn new(
        name: &'static str,
        side: Side,
        reader: Box<dyn Read + 'r>,
        whole: bool,
    ) -> Result<Self> {
        let reader = match PcapReader::new(reader) {
            Err(PcapError::IoError(e)) if e.kind() == ErrorKind::UnexpectedEof => {
                bail!("{name}: shorter than the header of a pcap file")
            }
            reader => reader.with_context(|| format!("{name}: not a pcap file"))?,
        };
        let link = reader.header().datalink;
        ensure!(link == DataLink::ETHERNET, "{name}: frames of {link:?}, not of Ethernet");
        let (count, latest) = (0, Instant::ZERO);
        let mut frames = Self { name, side, reader, whole, count, latest, next: None };
        frames.advance()?;
        Ok(frames)
    }

    /// Takes the next frame.
    fn take(&mut self) -> Result<Option<Frame>> {
        let frame = self.next.take();
        self.advance()?;
        Ok(frame)
    }

    fn advance(&mut self) -> Result<()> {
        let Self { name, count, .. } = *self;
        let packet = match self.reader.next_packet() {
            None => return Ok(()),
            Some(Err(PcapError::IoError(e))) if e.kind() == ErrorKind::UnexpectedEof => {
                ensure!(!self.whole, "{name}: cut off within record {count}");
                return Ok(());
            }
            Some(packet) => packet.with_context(|| format!("{name}: record {count} is broken"))?,
        };
        let (len, had) = (packet.data.len(), packet.orig_len);
        ensure!(len == had as usize, "{name}: record {count} has {len} of {had} bytes only");
        self.count += 1;
        // No clock of frames goes back.
        self.latest = self.latest.max(instant(packet.timestamp));
        let (at, side) = (self.latest, self.side);
        self.next = Some(Frame { at, side, bytes: packet.data.into_owned() });
        Ok(())
    }
}

fn instant(at: Duration) -> Instant {
    Instant::from_nanos(u64::try_from(at.as_nanos()).unwrap_or(u64::MAX))
}

/// Both captures, turn by turn of the host.
pub(super) struct Merged<'r, 'o> {
    /// The remote's side, the guest's side.
    sides: [Frames<'r>; 2],
    options: &'o Options,
}

impl<'r, 'o> Merged<'r, 'o> {
    pub(super) fn new(remote: Frames<'r>, guest: Frames<'r>, options: &'o Options) -> Self {
        Self { sides: [remote, guest], options }
    }

    /// The frames of the next instant, causes before effects: frames of R first, with those that
    /// left by the uplink in between, then frames of G, and then the others that left. Behind an
    /// attached tap G is read first.
    pub(super) fn next_turn(&mut self) -> Result<Option<Vec<Frame>>> {
        let heads = self.sides.each_ref().map(|f| f.next.as_ref().map(|f| f.at));
        let one_ended = heads.contains(&None);
        let first = heads.into_iter().flatten().min();
        let Some(at) = first.filter(|_| self.options.whole || !one_ended) else {
            return Ok(None);
        };
        let [mut remote, mut guest] = [Vec::new(), Vec::new()];
        for (frames, of_turn) in self.sides.iter_mut().zip([&mut remote, &mut guest]) {
            while frames.next.as_ref().is_some_and(|f| f.at == at) {
                of_turn.extend(frames.take()?);
            }
        }
        let inputs = |frames: &[Frame]| {
            let is_input = |f: &Frame| {
                sender(&f.bytes, &self.options.guests).is_some_and(|(_, from)| from == f.side)
            };
            frames.iter().rposition(is_input).map_or(0, |last| last + 1)
        };
        let later_remote = remote.split_off(inputs(&remote));
        let later_guest = guest.split_off(inputs(&guest));
        let in_order = match self.options.attached {
            false => [remote, guest, later_remote, later_guest],
            true => [guest, remote, later_remote, later_guest],
        };
        Ok(Some(in_order.into_iter().flatten().collect()))
    }
}
