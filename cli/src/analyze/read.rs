//! Frames of capture files: pcap and pcapng, as tcpdump, Wireshark and `nightporter capture` write
//! them.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use nightporter_core::time::{Duration, Instant};
use pcap_parser::traits::PcapReaderIterator;
use pcap_parser::{Block, OptionCode, PcapBlockOwned, PcapError, PcapNGOption, create_reader};

/// Bytes of a frame that are kept: more than all headers that the monitor reads.
const HEAD: usize = 512;
/// The reader's buffer at first, and at most: tcpdump writes frames of up to 256 KiB, and a block
/// of pcapng may hold the names of all hosts.
const BUFFER: usize = 1 << 20;
const BUFFER_MAX: usize = 16 << 20;
/// Frames of one clock are out of order by less.
const CLOCK_STEP: Duration = Duration::from_secs(1);
/// MAC addresses of a frame that was captured without.
const NO_MACS: [u8; 12] = [0; 12];

/// A capture file, read frame by frame.
pub(super) struct Capture {
    pub(super) path: PathBuf,
    reader: Box<dyn PcapReaderIterator + Send>,
    interfaces: Vec<Interface>,
    /// The frame at hand; see [`Self::read_next`].
    pub(super) frame: Frame,
    pub(super) counts: Counts,
}

/// A frame of a capture.
#[derive(Debug, Default)]
pub(super) struct Frame {
    /// When it was captured, since 1970.
    pub(super) at: Instant,
    /// Its bytes on the wire.
    pub(super) len: usize,
    /// The first of them, Ethernet header included.
    pub(super) head: Vec<u8>,
    /// Of pcapng: the number of its interface, and whether it came in there or left, if that is
    /// known.
    pub(super) interface: usize,
    pub(super) is_inbound: Option<bool>,
}

/// Counts of a file's frames.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) frames: u64,
    pub(super) bytes: u64,
    pub(super) first: Option<Instant>,
    pub(super) last: Instant,
    /// Frames whose times are before those of the frame before.
    pub(super) backwards: u64,
    /// Packets without a time, or of an interface that is not described: they are left out.
    pub(super) unusable: u64,
    /// Packets of a link that is none of [`Link`]: they are left out.
    pub(super) other_links: u64,
    /// Frames that the capture has missed, by its own last word.
    pub(super) missed: u64,
    pub(super) end: End,
}

/// How a file ends.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) enum End {
    #[default]
    Whole,
    /// In the middle of a frame: the writer was stopped, or its disk was full.
    Cut,
    /// No frame is to be found from this byte on.
    Damaged(usize),
}

/// Link type of an interface's packets, and the unit of their times.
#[derive(Clone, Copy, Debug)]
struct Interface {
    link: Option<Link>,
    units_per_second: u64,
    offset_s: i64,
}

/// Link types (tcpdump.org, "Link-layer header types").
#[derive(Clone, Copy, Debug)]
enum Link {
    Ethernet,
    /// IP alone.
    Raw,
    /// Linux' `any`: bytes of its header, and where in it the EtherType is.
    Cooked(usize, usize),
}

impl Link {
    fn of(number: i32) -> Option<Self> {
        Some(match number {
            1 => Self::Ethernet,
            12 | 14 | 101 | 228 | 229 => Self::Raw,
            113 => Self::Cooked(16, 14),
            276 => Self::Cooked(20, 0),
            _ => return None,
        })
    }

    /// Puts the first bytes of a packet into `head`, behind an Ethernet header. Returns the frame's
    /// length; `None` if the packet is shorter than its own header.
    fn write_frame(self, packet: &[u8], len: usize, head: &mut Vec<u8>) -> Option<usize> {
        head.clear();
        let skipped = match self {
            Self::Ethernet => 0,
            Self::Raw => {
                let is_v6 = packet.first()? >> 4 == 6;
                head.extend(NO_MACS);
                head.extend(if is_v6 { [0x86, 0xdd] } else { [0x08, 0x00] });
                0
            }
            Self::Cooked(skipped, ethertype) => {
                head.extend(NO_MACS);
                head.extend(packet.get(..skipped)?.get(ethertype..ethertype + 2)?);
                skipped
            }
        };
        let added = head.len();
        let rest = &packet[skipped..];
        head.extend(&rest[..rest.len().min(HEAD)]);
        Some(len.checked_sub(skipped)? + added)
    }
}

impl Interface {
    /// A time of the file in nanoseconds since 1970; `None` if that is beyond 2554.
    fn time(&self, units: u64) -> Option<Instant> {
        let ns = u128::from(units) * 1_000_000_000 / u128::from(self.units_per_second.max(1));
        let offset = i128::from(self.offset_s) * 1_000_000_000;
        let ns = i128::try_from(ns).ok()?.checked_add(offset)?;
        u64::try_from(ns).ok().map(Instant::from_nanos)
    }
}

/// The units of a second that pcapng's `if_tsresol` means.
fn resolution(if_tsresol: u8) -> Option<u64> {
    let exponent = u32::from(if_tsresol & 0x7f);
    if if_tsresol & 0x80 == 0 { 10_u64.checked_pow(exponent) } else { 1_u64.checked_shl(exponent) }
}

/// Reads as much as there is room for, if it can be had: of a pipe, too.
struct Full<R>(R);

impl<R: Read> Read for Full<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match self.0.read(&mut buffer[done..]) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }
}

/// The effect of one block of a file.
enum BlockKind {
    /// A frame is at hand.
    Frame,
    /// Something else was.
    Other,
    /// The file is over.
    End,
}

impl Capture {
    /// Opens a file; `-` is standard input.
    ///
    /// # Errors
    /// It cannot be read, or is no capture.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let input: Box<dyn Read + Send> = if path == Path::new("-") {
            Box::new(io::stdin())
        } else {
            let file = File::open(path);
            let fix = "give a capture that you may read, or - for standard input";
            let error = |e| anyhow!("cannot read {}: {e}\n    fix: {fix}", path.display());
            Box::new(file.map_err(error)?)
        };
        Self::of(path, input)
    }

    /// Reads `input`, which is called `path`.
    ///
    /// # Errors
    /// As above.
    pub(super) fn of(path: &Path, input: Box<dyn Read + Send>) -> Result<Self> {
        let reader = match create_reader(BUFFER, Full(input)) {
            Ok(reader) => reader,
            Err(PcapError::ReadError) => bail!("cannot read {}", path.display()),
            Err(PcapError::Eof) => bail!("{} is empty", path.display()),
            Err(_) => bail!(
                "{} is neither pcap nor pcapng\n    fix: capture with tcpdump -w, Wireshark or \
                 nightporter capture",
                path.display()
            ),
        };
        let (interfaces, counts) = (Vec::new(), Counts::default());
        Ok(Self { path: path.to_owned(), reader, interfaces, frame: Frame::default(), counts })
    }

    /// Reads the next frame into `frame`; whether there was one.
    ///
    /// # Errors
    /// The file cannot be read any further.
    pub(super) fn read_next(&mut self) -> Result<bool> {
        loop {
            match self.step()? {
                BlockKind::Frame => return Ok(true),
                BlockKind::Other => {}
                BlockKind::End => return Ok(false),
            }
        }
    }

    fn step(&mut self) -> Result<BlockKind> {
        let consumed = self.reader.consumed();
        let is_over = self.reader.data().is_empty();
        let error = match self.reader.next() {
            Ok((size, block)) => {
                let packet = take(&block, &mut self.interfaces, &mut self.frame);
                self.reader.consume(size);
                return Ok(self.count(packet));
            }
            Err(error) => error.to_owned_vec(),
        };
        match error {
            PcapError::Incomplete(_) => {
                if self.reader.refill().is_err() {
                    bail!("cannot read {} from byte {consumed} on", self.path.display());
                }
                return Ok(BlockKind::Other);
            }
            PcapError::BufferTooSmall => {
                let size = self.reader.data().len().max(BUFFER) * 2;
                if size <= BUFFER_MAX && self.reader.grow(size) {
                    let _ = self.reader.refill();
                    return Ok(BlockKind::Other);
                }
                self.counts.end = End::Damaged(consumed);
            }
            PcapError::Eof => {}
            PcapError::UnexpectedEof if is_over => {}
            PcapError::UnexpectedEof => self.counts.end = End::Cut,
            _ => self.counts.end = End::Damaged(consumed),
        }
        Ok(BlockKind::End)
    }

    fn count(&mut self, packet: Packet) -> BlockKind {
        let counts = &mut self.counts;
        match packet {
            Packet::None => return BlockKind::Other,
            Packet::Unusable => counts.unusable += 1,
            Packet::OtherLink => counts.other_links += 1,
            Packet::Missed(frames) => counts.missed = frames,
            Packet::Taken => {
                let at = &mut self.frame.at;
                counts.backwards += u64::from(*at < counts.last);
                // Queues of a NIC are read one after the other. A long step is the clock's.
                if counts.last.since(*at) < CLOCK_STEP {
                    *at = (*at).max(counts.last);
                }
                counts.first.get_or_insert(*at);
                counts.last = *at;
                counts.frames += 1;
                counts.bytes += self.frame.len as u64;
                return BlockKind::Frame;
            }
        }
        BlockKind::Other
    }
}

/// The packet in a block.
enum Packet {
    None,
    Taken,
    Unusable,
    OtherLink,
    /// So many have been missed so far.
    Missed(u64),
}

/// Takes a block: describes an interface, or fills the frame.
fn take(block: &PcapBlockOwned<'_>, interfaces: &mut Vec<Interface>, frame: &mut Frame) -> Packet {
    match block {
        PcapBlockOwned::LegacyHeader(header) => {
            let nanos = header.is_nanosecond_precision();
            let units_per_second = if nanos { 1_000_000_000 } else { 1_000_000 };
            // Above the type may be what is known of the FCS.
            let link = Link::of(header.network.0 & 0xffff);
            interfaces.push(Interface { link, units_per_second, offset_s: 0 });
            Packet::None
        }
        PcapBlockOwned::Legacy(it) => {
            let units = interfaces.first().map_or(1, |of| of.units_per_second);
            let time = u64::from(it.ts_sec) * units + u64::from(it.ts_usec);
            fill(interfaces.first(), Some(time), it.data, it.origlen, frame)
        }
        PcapBlockOwned::NG(Block::SectionHeader(_)) => {
            interfaces.clear();
            Packet::None
        }
        PcapBlockOwned::NG(Block::InterfaceDescription(it)) => {
            interfaces.push(Interface {
                link: Link::of(it.linktype.0),
                units_per_second: resolution(it.if_tsresol).unwrap_or(0),
                offset_s: it.if_tsoffset,
            });
            Packet::None
        }
        PcapBlockOwned::NG(Block::EnhancedPacket(it)) => {
            let time = u64::from(it.ts_high) << 32 | u64::from(it.ts_low);
            let interface = usize::try_from(it.if_id).ok().and_then(|id| interfaces.get(id));
            frame.interface = it.if_id as usize;
            frame.is_inbound = is_inbound(&it.options);
            let captured = it.caplen as usize;
            let data = it.data.get(..captured).unwrap_or(it.data);
            fill(interface, Some(time), data, it.origlen, frame)
        }
        PcapBlockOwned::NG(Block::SimplePacket(it)) => {
            fill(interfaces.first(), None, it.data, it.origlen, frame)
        }
        PcapBlockOwned::NG(Block::InterfaceStatistics(it)) => match it.isb_ifdrop() {
            Some(Ok(frames)) => Packet::Missed(frames),
            _ => Packet::None,
        },
        PcapBlockOwned::NG(_) => Packet::None,
    }
}

/// The direction of `epb_flags`, in this machine's byte order.
fn is_inbound(options: &[PcapNGOption<'_>]) -> Option<bool> {
    let flags = options.iter().find(|option| option.code == OptionCode(2))?;
    match u32::from_ne_bytes(*flags.value.first_chunk()?) & 3 {
        1 => Some(true),
        2 => Some(false),
        _ => None,
    }
}

fn fill(
    interface: Option<&Interface>,
    time: Option<u64>,
    data: &[u8],
    len: u32,
    frame: &mut Frame,
) -> Packet {
    let Some(interface) = interface.filter(|of| of.units_per_second > 0) else {
        return Packet::Unusable;
    };
    let Some(at) = time.and_then(|time| interface.time(time)) else { return Packet::Unusable };
    let Some(link) = interface.link else { return Packet::OtherLink };
    // A file may say less than it holds.
    let len = data.len().max(len as usize);
    let Some(len) = link.write_frame(data, len, &mut frame.head) else { return Packet::Unusable };
    (frame.at, frame.len) = (at, len);
    Packet::Taken
}
