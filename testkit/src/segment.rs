//! Segments as text: `P. 1:1001 ack 1 win 65536 <ts 10 5> <sack 2001:3001>`.
//!
//! The words may be in any order. A missing word is chosen by default when sending, and not
//! compared when expecting:
//!
//! | word | meaning |
//! |---|---|
//! | `.` `P.` `F.` `S` `R.` ... | flags; left out: an ACK, PSH optional |
//! | `1:1001` or `1001` | sequence range; left out: the next bytes |
//! | `ack 1` | left out: as in the segment before |
//! | `win 65536`, `edge 65537` | window in bytes, or where it ends |
//! | `<ts 10 5>` `<ts - 5>` `<nots>` | TSval and TSecr, relative to the two clocks |
//! | `<sack 2001:3001 ...>` | blocks; left out when expecting: none |
//! | `<opt 1e03..>` | raw option bytes |
//! | `fill A` | payload of this byte instead of the stream's pattern |
//! | `urg 5` | URG and the pointer |
//! | `ce` `ect0` `notect` | ECN codepoint |
//! | `badsum` `pad` `partial` `gso 1000` `ipopt` | changes of the frame around it |

use nightporter_check::wire::TcpFlags;

/// A segment to send or to expect. Sequence numbers are relative.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Spec {
    /// Flags.
    pub flags: Option<TcpFlags>,
    /// First number and end of the payload.
    pub seq: Option<(i64, i64)>,
    /// Acknowledgement.
    pub ack: Option<i64>,
    /// Window in bytes.
    pub window: Option<u32>,
    /// Where the window ends.
    pub edge: Option<i64>,
    /// TSval, from the sender's clock on.
    pub tsval: Option<u32>,
    /// TSecr, from the receiver's clock on.
    pub tsecr: Option<u32>,
    /// No timestamps.
    pub no_ts: bool,
    /// SACK blocks.
    pub sack: Vec<(i64, i64)>,
    /// Options as they are on the wire.
    pub raw_options: Vec<u8>,
    /// All of the payload is this byte.
    pub fill: Option<u8>,
    /// URG, and the pointer.
    pub urgent: Option<u16>,
    /// ECN codepoint.
    pub ecn: Option<u8>,
    /// A bit of the last byte is wrong.
    pub bad_checksum: bool,
    /// Ethernet padding behind the packet.
    pub padded: bool,
    /// The checksum is left to the driver.
    pub partial: bool,
    /// A super-segment, to be cut into pieces of so many bytes.
    pub gso: Option<u16>,
    /// An IPv4 record-route option of which nothing is filled in.
    pub ip_options: bool,
}

impl Spec {
    /// Reads the text form.
    ///
    /// # Panics
    /// On a word it does not know: the test is broken.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut spec = Self::default();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let after;
            if let Some(option) = rest.strip_prefix('<') {
                let (option, tail) = option.split_once('>').expect("an option ends with >");
                spec.option(option);
                after = tail;
            } else {
                let (word, tail) = rest.split_once(' ').unwrap_or((rest, ""));
                after = spec.word(word, tail.trim_start());
            }
            rest = after.trim_start();
        }
        spec
    }

    fn word<'t>(&mut self, word: &str, tail: &'t str) -> &'t str {
        let mut tail = tail;
        let mut argument = || {
            let (word, rest) = tail.split_once(' ').unwrap_or((tail, ""));
            tail = rest;
            word.to_owned()
        };
        let number = |s: &str| s.parse::<i64>().unwrap_or_else(|_| panic!("`{s}`: no number"));
        match word {
            "ack" => self.ack = Some(number(&argument())),
            "win" => self.window = Some(argument().parse().expect("a window")),
            "edge" => self.edge = Some(number(&argument())),
            "fill" => self.fill = argument().bytes().next(),
            "urg" => self.urgent = Some(argument().parse().expect("a pointer")),
            "gso" => self.gso = Some(argument().parse().expect("a size")),
            "ce" => self.ecn = Some(3),
            "ect0" => self.ecn = Some(2),
            "notect" => self.ecn = Some(0),
            "badsum" => self.bad_checksum = true,
            "pad" => self.padded = true,
            "partial" => self.partial = true,
            "ipopt" => self.ip_options = true,
            _ if word.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
                let (from, to) = word.split_once(':').unwrap_or((word, word));
                self.seq = Some((number(from), number(to)));
            }
            _ => self.flags = Some(flags(word)),
        }
        tail
    }

    fn option(&mut self, text: &str) {
        let mut words = text.split_whitespace();
        match words.next() {
            Some("ts") => {
                self.tsval = words.next().and_then(|w| w.parse().ok());
                self.tsecr = words.next().and_then(|w| w.parse().ok());
            }
            Some("nots") => self.no_ts = true,
            Some("sack") => {
                let range = |w: &str| w.split_once(':').map(|(a, b)| (a.parse(), b.parse()));
                for (a, b) in words.map(|w| range(w).expect("a:b")) {
                    self.sack.push((a.expect("a number"), b.expect("a number")));
                }
            }
            Some("opt") => {
                let hex: String = words.collect();
                let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).expect("hex");
                self.raw_options = (0..hex.len()).step_by(2).map(byte).collect();
            }
            other => panic!("option {other:?}"),
        }
    }
}

fn flags(word: &str) -> TcpFlags {
    word.chars().fold(TcpFlags::NONE, |sum, c| {
        sum | match c {
            '.' => TcpFlags::ACK,
            'S' => TcpFlags::SYN,
            'F' => TcpFlags::FIN,
            'R' => TcpFlags::RST,
            'P' => TcpFlags::PSH,
            'U' => TcpFlags::URG,
            'E' => TcpFlags::ECE,
            'W' => TcpFlags::CWR,
            'e' => TcpFlags::AE,
            '0' => TcpFlags::NONE,
            _ => panic!("`{word}`: no word of a segment"),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_in_any_order_and_what_is_left_out_is_left_open() {
        let one = Spec::parse("P. 1:1001 ack 7 win 512 <ts 10 5> <sack 2001:3001>");
        let two = Spec::parse("<sack 2001:3001> win 512 1:1001 <ts 10 5> P. ack 7");
        assert_eq!(one, two);
        assert_eq!((one.seq, one.ack, one.window), (Some((1, 1001)), Some(7), Some(512)));
        assert_eq!(
            (one.tsval, one.tsecr, one.sack.as_slice()),
            (Some(10), Some(5), &[(2001, 3001)][..])
        );
        assert_eq!(one.flags, Some(TcpFlags::ACK | TcpFlags::PSH));
        assert_eq!(Spec::parse(""), Spec::default());
        assert_eq!(Spec::parse("<opt 1e03aa>").raw_options, [0x1e, 3, 0xaa]);
    }
}
