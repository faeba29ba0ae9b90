//! The report of a failure: the last packets of a flow as text, and both sides as captures.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use nightporter_core::trace::SegmentLine;
use nightporter_core::wire::packet::{Packet, Seq};
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapWriter};
use pcap_file::{DataLink, TsResolution};

use crate::observer::flow_of;
use crate::world::Recorder;
use nightporter_check::tap::{FlowName, Tap, Tapped};

/// Remembers frames for a report.
pub struct Packets {
    flow: Option<FlowName>,
    shown: usize,
    lines: VecDeque<String>,
    /// First sequence numbers seen by sender, to be subtracted.
    bases: BTreeMap<(FlowName, bool), Seq>,
    /// The remote side, the guests' side.
    sides: [Vec<(u64, Vec<u8>)>; 2],
}

impl Packets {
    /// Of one flow or, if there is none, of all.
    #[must_use]
    pub fn new(flow: Option<FlowName>, shown: usize) -> Self {
        let (lines, bases) = (VecDeque::new(), BTreeMap::new());
        Self { flow, shown, lines, bases, sides: [Vec::new(), Vec::new()] }
    }

    /// The last packets, one a line.
    #[must_use]
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("  {line}\n")).collect()
    }

    /// Writes `BASE-remote.pcap` and `BASE-guest.pcap`.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn write(&self, base: &Path) -> anyhow::Result<[PathBuf; 2]> {
        let name = base.file_name().and_then(|n| n.to_str()).unwrap_or("seed");
        let paths =
            ["remote", "guest"].map(|side| base.with_file_name(format!("{name}-{side}.pcap")));
        for (path, frames) in paths.iter().zip(&self.sides) {
            let frames = frames.iter().map(|(ns, bytes)| (*ns, bytes.as_slice()));
            write_pcap(path, frames).with_context(|| format!("write {}", path.display()))?;
        }
        Ok(paths)
    }

    fn line(&mut self, t: &Tapped<'_>) -> Option<String> {
        let (flow, from_guest) = flow_of(t.packet?, t.tap)?;
        let packet = Packet::parse(t.bytes).ok()?;
        let (_, tcp) = packet.tcp()?;
        if self.flow.is_some_and(|f| f != flow) {
            return None;
        }
        let seq_base = *self.bases.entry((flow, from_guest)).or_insert(tcp.seq);
        let ack_base = self.bases.get(&(flow, !from_guest)).copied().unwrap_or(Seq(0));
        let direction = match t.tap {
            Tap::FromNet => "R>",
            Tap::ToNet => ">R",
            Tap::FromGuest(_) => "G>",
            Tap::ToGuest(_) => ">G",
        };
        let segment = SegmentLine { direction, tcp, seq_base, ack_base };
        let forged = if t.forged { " (forged)" } else { "" };
        Some(format!("{} {}:{} {segment}{forged}", t.at, flow.guest, flow.guest_port))
    }
}

/// A capture of Ethernet frames, each with its time in nanoseconds.
///
/// # Errors
/// If the file cannot be written.
pub fn write_pcap<'f>(
    path: &Path,
    frames: impl Iterator<Item = (u64, &'f [u8])>,
) -> anyhow::Result<()> {
    let header = PcapHeader {
        snaplen: 1 << 18,
        datalink: DataLink::ETHERNET,
        ts_resolution: TsResolution::NanoSecond,
        ..PcapHeader::default()
    };
    let file = BufWriter::new(File::create(path)?);
    let mut pcap = PcapWriter::with_header(file, header)?;
    for (ns, bytes) in frames {
        let len = u32::try_from(bytes.len())?;
        pcap.write_packet(&PcapPacket::new(Duration::from_nanos(ns), len, bytes))?;
    }
    Ok(())
}

impl Recorder for Packets {
    fn frame(&mut self, t: &Tapped<'_>) {
        if let Some(line) = self.line(t) {
            if self.lines.len() == self.shown {
                self.lines.pop_front();
            }
            self.lines.push_back(line);
        }
        let side = usize::from(!matches!(t.tap, Tap::FromNet | Tap::ToNet));
        self.sides[side].push((t.at.as_nanos(), t.bytes.to_vec()));
    }
}
