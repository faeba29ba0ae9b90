//! Translation of a connection's frames between G's numbers and those that R was given (ACC-04).
//!
//! Where H has answered R's SYN, R counts G's bytes from H's initial sequence number and G's clock
//! from a TSval of H. For the connection's life a [`Translation`] stands at the edge toward G, the
//! one place where G's own numbers are used:
//!
//! | | [`from_guest`](Translation::from_guest) | [`to_guest`](Translation::to_guest) |
//! |---|---|---|
//! | sequence number | + `seq` | as it is: R's numbers are G's |
//! | acknowledgement, SACK, DSACK | as they are | - `seq` |
//! | TSval | + `clock` | as it is |
//! | TSecr | as it is | - `clock`, if the segment has ACK |
//! | window, not of a SYN | in R's scale | in G's, if G has none |
//!
//! [`error_to_guest`](Translation::error_to_guest) does it to the number that an ICMP error quotes.
//! Payload and length never change, checksums follow by increments. A frame that cannot be
//! translated is left as it was ([`Untranslatable`], ACC-17).

use super::checksum::{fold, sum, update16, update32};
use super::icmp::Quoted;
use super::ip::{Ip, L4, PROTOCOL_AH, tcp_fragment};
use super::saved::saved;
use super::seq::Seq;
use super::tcp::{
    CHECKSUM_AT, FLAGS_AT, HEADER, HEADER_MAX, KIND_AO, KIND_MD5, KIND_NOP, KIND_SACK,
    KIND_TIMESTAMPS, SackBlocks, TcpFlags, Timestamps, WINDOW_AT, header_len, options_mut,
};
use super::{be16, be32};

/// Where the numbers are in the TCP header.
const SEQ_AT: usize = 4;
const ACK_AT: usize = 8;
/// Where TSecr is in the contents of its option.
const TSECR_AT: usize = 4;

/// The differences between G's own numbers and those that R was given. By default there are none.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Translation {
    /// R's number of a byte of G less G's, modulo 2^32.
    pub seq: u32,
    /// A clock of G as R was shown it less G's, modulo 2^32 (ACC-12).
    pub clock: u32,
    /// The shift of windows as G writes them, at most 14.
    pub shift_of_guest: u8,
    /// The shift of G's windows as R was told, at most 14.
    pub shift_to_net: u8,
    /// The shift of R's windows that G does not know of: R's if G's SYN-ACK had no scale, else 0
    /// (ACC-05).
    pub shift_unknown: u8,
    /// G does not read SACK although R sends it: blocks are overwritten (ACC-05).
    pub hides_sack: bool,
}

saved! {
    Translation {
        seq, clock, shift_of_guest, shift_to_net, shift_unknown, hides_sack,
    }
    check |it| [it.shift_of_guest, it.shift_to_net, it.shift_unknown].iter().all(|it| *it <= 14)
}

/// Both ends have to be told that the connection is over (ACC-17).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Untranslatable {
    /// A signature covers the numbers: AH, TCP-AO, the MD5 option.
    Signed,
    /// A fragment that has a part of the TCP header.
    CutHeader,
    /// The header does not fit the packet.
    Malformed,
}

impl Translation {
    /// G's byte `seq` as R knows it.
    #[inline]
    #[must_use]
    pub const fn seq_from_guest(&self, seq: Seq) -> Seq {
        Seq(seq.0.wrapping_add(self.seq))
    }

    /// An acknowledgement of R, or an edge of a block, as G knows it.
    #[inline]
    #[must_use]
    pub const fn ack_to_guest(&self, ack: Seq) -> Seq {
        Seq(ack.0.wrapping_sub(self.seq))
    }

    /// A clock of G as R is shown it.
    #[inline]
    #[must_use]
    pub const fn tsval_from_guest(&self, tsval: u32) -> u32 {
        tsval.wrapping_add(self.clock)
    }

    /// A clock of G that R echoes, as G sent it.
    #[inline]
    #[must_use]
    pub const fn tsecr_to_guest(&self, tsecr: u32) -> u32 {
        tsecr.wrapping_sub(self.clock)
    }

    /// The field for a window of G, in the scale that R was told. It never says more than G.
    #[inline]
    #[must_use]
    pub fn window_from_guest(&self, window: u16) -> u16 {
        field(u32::from(window) << self.shift_of_guest >> self.shift_to_net)
    }

    /// The field for a window of R, in the scale that G knows. It never says more than R.
    #[inline]
    #[must_use]
    pub fn window_to_guest(&self, window: u16) -> u16 {
        field(u32::from(window) << self.shift_unknown)
    }

    /// A frame of G becomes one that R understands. `ip` was read from it; `partial`: as in
    /// [`TcpEdit`](super::edit::TcpEdit). A frame without a TCP header is left as it is.
    ///
    /// # Errors
    /// [`Untranslatable`]: the frame is as it was.
    pub fn from_guest(
        &self,
        frame: &mut [u8],
        ip: &Ip,
        partial: bool,
    ) -> Result<(), Untranslatable> {
        rewrite(frame, ip, partial, |header, options| {
            edit32(header, SEQ_AT, |seq| self.seq_from_guest(Seq(seq)).0);
            if !flags(header).syn() {
                edit16(header, WINDOW_AT, |window| self.window_from_guest(window));
            }
            each_option(options, |kind, body| {
                if kind == KIND_TIMESTAMPS && body.len() == 8 {
                    edit32(body, 0, |tsval| self.tsval_from_guest(tsval));
                }
            })
        })
    }

    /// A frame of R becomes one that G understands; the same arguments and errors.
    ///
    /// # Errors
    /// [`Untranslatable`]: the frame is as it was.
    pub fn to_guest(&self, frame: &mut [u8], ip: &Ip, partial: bool) -> Result<(), Untranslatable> {
        rewrite(frame, ip, partial, |header, options| {
            let flags = flags(header);
            if flags.ack() {
                edit32(header, ACK_AT, |ack| self.ack_to_guest(Seq(ack)).0);
            }
            if !flags.syn() {
                edit16(header, WINDOW_AT, |window| self.window_to_guest(window));
            }
            each_option(options, |kind, body| match kind {
                // Without ACK nothing is echoed (RFC 7323 section 3.2).
                KIND_TIMESTAMPS if body.len() == 8 && flags.ack() => {
                    edit32(body, TSECR_AT, |tsecr| self.tsecr_to_guest(tsecr));
                }
                KIND_SACK if !body.is_empty() && body.len().is_multiple_of(8) => {
                    for at in (0..body.len()).step_by(4) {
                        edit32(body, at, |edge| self.ack_to_guest(Seq(edge)).0);
                    }
                }
                _ => {}
            })?;
            if self.hides_sack { hide_sack(options) } else { Ok(()) }
        })
    }

    /// Acknowledgement, window, blocks and timestamps of a segment with these flags that is made
    /// for G. Without ACK it acknowledges and echoes nothing.
    #[must_use]
    pub fn of_made(
        &self,
        flags: TcpFlags,
        ack: Seq,
        window: u16,
        mut sack: SackBlocks,
        timestamps: &mut Option<Timestamps>,
    ) -> (Seq, u16, SackBlocks) {
        let is_ack = flags.ack();
        if let Some(ts) = timestamps {
            ts.tsecr = if is_ack { self.tsecr_to_guest(ts.tsecr) } else { 0 };
        }
        if self.hides_sack {
            sack = SackBlocks::default();
        }
        sack.each_edge(|edge| self.ack_to_guest(edge));
        let ack = if is_ack { self.ack_to_guest(ack) } else { Seq(0) };
        (ack, self.window_to_guest(window), sack)
    }

    /// The number that an ICMP error on its way to G quotes, of a segment of G, becomes G's own.
    ///
    /// # Panics
    /// If `ip` and `quoted` were not read from the frame.
    pub fn error_to_guest(&self, frame: &mut [u8], ip: &Ip, quoted: &Quoted) {
        let icmp = &mut frame[usize::from(ip.payload_offset)..];
        let own = self.ack_to_guest(quoted.seq);
        if own != quoted.seq {
            edit32(icmp, quoted.seq_at, |_| own.0);
            edit16(icmp, Quoted::CHECKSUM_AT, |check| update32(check, quoted.seq.0, own.0));
        }
    }
}

/// A window of so many units, or as much as the field can say.
fn field(units: u32) -> u16 {
    u16::try_from(units).unwrap_or(u16::MAX)
}

/// Edits the TCP header of a frame, if it has one. If `edit` refuses it, nothing has changed.
fn rewrite(
    frame: &mut [u8],
    ip: &Ip,
    partial: bool,
    edit: impl FnOnce(&mut [u8; HEADER], &mut [u8]) -> Result<(), Untranslatable>,
) -> Result<(), Untranslatable> {
    let Some(start) = header_start(frame, ip)? else { return Ok(()) };
    // Of a first fragment only a part of the segment is here.
    let segment = frame.get_mut(start..ip.end as usize).ok_or(Untranslatable::Malformed)?;
    let fixed = segment.first_chunk().ok_or(Untranslatable::CutHeader)?;
    let len = header_len(fixed);
    if len < HEADER {
        return Err(Untranslatable::Malformed);
    }
    let header = segment.get_mut(..len).ok_or(Untranslatable::CutHeader)?;
    let mut copy = [0; HEADER_MAX];
    let copy = &mut copy[..len];
    copy.copy_from_slice(header);
    let (fixed, options) = copy.split_first_chunk_mut().ok_or(Untranslatable::Malformed)?;
    edit(fixed, options)?;
    // Over all of the header: options are at any offset, and rarely more than 12 bytes.
    let (old, new) = (fold(sum(header, 0)), fold(sum(copy, 0)));
    if !partial && old != new {
        edit16(copy, CHECKSUM_AT, |check| update16(check, old, new));
    }
    header.copy_from_slice(copy);
    Ok(())
}

/// Where the frame's TCP header starts; `None` if it has none.
fn header_start(frame: &[u8], ip: &Ip) -> Result<Option<usize>, Untranslatable> {
    match ip.l4 {
        L4::Tcp(_) => Ok(Some(usize::from(ip.payload_offset))),
        L4::MalformedTcp => Err(Untranslatable::Malformed),
        L4::Opaque if ip.protocol == PROTOCOL_AH => Err(Untranslatable::Signed),
        L4::Fragment => match tcp_fragment(frame, ip) {
            Some((0, start)) => Ok(Some(start)),
            // RFC 1858 section 3: the header may go on here.
            Some((before, _)) if before < HEADER_MAX => Err(Untranslatable::CutHeader),
            _ => Ok(None),
        },
        _ => Ok(None),
    }
}

/// Visits the options as Linux does (`tcp_parse_options`, 6.18): to the end, or to a length that
/// cannot be. One that comes twice is visited twice, whichever of them the receiver takes.
fn each_option(
    options: &mut [u8],
    mut visit: impl FnMut(u8, &mut [u8]),
) -> Result<(), Untranslatable> {
    let mut signed = false;
    options_mut(options, |kind, option| {
        signed |= matches!(kind, KIND_MD5 | KIND_AO);
        visit(kind, &mut option[2..]);
    });
    if signed { Err(Untranslatable::Signed) } else { Ok(()) }
}

fn hide_sack(options: &mut [u8]) -> Result<(), Untranslatable> {
    options_mut(options, |kind, option| {
        if kind == KIND_SACK {
            option.fill(KIND_NOP);
        }
    });
    Ok(())
}

fn flags(header: &[u8; HEADER]) -> TcpFlags {
    TcpFlags(be16(header, FLAGS_AT))
}

fn edit16(bytes: &mut [u8], at: usize, edit: impl FnOnce(u16) -> u16) {
    let new = edit(be16(bytes, at));
    bytes[at..at + 2].copy_from_slice(&new.to_be_bytes());
}

fn edit32(bytes: &mut [u8], at: usize, edit: impl FnOnce(u32) -> u32) {
    let new = edit(be32(bytes, at));
    bytes[at..at + 4].copy_from_slice(&new.to_be_bytes());
}

#[cfg(test)]
mod tests;
