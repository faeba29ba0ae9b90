//! One line of text per packet, in the manner of tcpdump: for captures, per-flow traces and tests.

use crate::wire::packet::{Arp, Ip, L4, Net, Packet, Tcp, VlanStack};
use crate::wire::seq::Seq;
use core::fmt;

/// A line such as `R> P. 1:1001 ack 1 win 65535 <ts 10 20>`: direction, then segment.
///
/// Sequence numbers are shown relative to `seq_base` and `ack_base`, usually the two initial ones.
#[derive(Clone, Copy, Debug)]
pub struct SegmentLine<'a> {
    /// Where it comes from or goes to: `R>` into H from R, `>R` out to R, `G>` and `>G` likewise.
    pub direction: &'a str,
    /// The segment.
    pub tcp: &'a Tcp,
    /// The number that is subtracted from `seq`.
    pub seq_base: Seq,
    /// The number that is subtracted from `ack` and SACK blocks.
    pub ack_base: Seq,
}

impl fmt::Display for SegmentLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.direction)?;
        write_segment(f, self.tcp, self.seq_base, self.ack_base)
    }
}

impl fmt::Display for Packet {
    /// Addresses, ports, absolute sequence numbers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.eth.vlan.fmt(f)?;
        match &self.net {
            Net::Arp(arp) => arp.fmt(f),
            Net::Ip(ip) => ip.fmt(f),
            Net::Other => {
                write_mac(f, self.eth.src)?;
                f.write_str(" > ")?;
                write_mac(f, self.eth.dst)?;
                write!(f, " ethertype {:#06x}", self.eth.ethertype)
            }
        }
    }
}

impl fmt::Display for VlanStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for [_, _, hi, lo] in self.tags() {
            write!(f, "vlan {} ", u16::from_be_bytes([*hi, *lo]) & 0x0fff)?;
        }
        Ok(())
    }
}

impl fmt::Display for Arp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            1 => write!(f, "arp who-has {} tell {}", self.target_ip, self.sender_ip),
            2 => {
                write!(f, "arp {} is-at ", self.sender_ip)?;
                write_mac(f, self.sender_mac)
            }
            op => write!(f, "arp op {op} from {}", self.sender_ip),
        }
    }
}

impl fmt::Display for Ip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let L4::Tcp(tcp) = &self.l4 else {
            write!(f, "{} > {} ", self.src, self.dst)?;
            return match self.l4 {
                L4::Fragment => write!(f, "fragment proto {}", self.protocol),
                L4::Udp => f.write_str("udp"),
                L4::Icmp => f.write_str("icmp"),
                L4::MalformedTcp => f.write_str("malformed tcp"),
                L4::Tcp(_) | L4::Other | L4::Opaque => write!(f, "proto {}", self.protocol),
            };
        };
        let address =
            |f: &mut fmt::Formatter<'_>, ip, port| core::net::SocketAddr::new(ip, port).fmt(f);
        address(f, self.src.to_ip(), tcp.src_port)?;
        f.write_str(" > ")?;
        address(f, self.dst.to_ip(), tcp.dst_port)?;
        f.write_str(match self.tos & 3 {
            0 => ": ",
            1 => " [ect1]: ",
            2 => " [ect0]: ",
            _ => " [ce]: ",
        })?;
        tcp.fmt(f)
    }
}

impl fmt::Display for Tcp {
    /// `P. 1:1001 ack 1 win 65535 <ts 10 20>`: absolute numbers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_segment(f, self, Seq(0), Seq(0))
    }
}

fn write_segment(f: &mut fmt::Formatter<'_>, tcp: &Tcp, seq: Seq, ack: Seq) -> fmt::Result {
    let first = tcp.seq - seq;
    write!(f, "{} {first}:{}", tcp.flags, first.wrapping_add(tcp.payload_len))?;
    if tcp.flags.ack() {
        write!(f, " ack {}", tcp.ack - ack)?;
    }
    write!(f, " win {}", tcp.window)?;
    if tcp.flags.urg() {
        write!(f, " urg {}", tcp.urgent)?;
    }
    let o = &tcp.options;
    let mut separator = " <";
    let mut option = |f: &mut fmt::Formatter<'_>, text: fmt::Arguments<'_>| {
        let before = core::mem::replace(&mut separator, ",");
        write!(f, "{before}{text}")
    };
    if let Some(mss) = o.mss {
        option(f, format_args!("mss {mss}"))?;
    }
    if let Some(shift) = o.window_scale {
        option(f, format_args!("ws {shift}"))?;
    }
    if o.sack_permitted {
        option(f, format_args!("sackOK"))?;
    }
    if let Some(ts) = o.timestamps {
        option(f, format_args!("ts {} {}", ts.tsval, ts.tsecr))?;
    }
    for (start, end) in o.sack.as_slice() {
        option(f, format_args!("sack {}:{}", *start - ack, *end - ack))?;
    }
    let marks = [(o.tfo, "tfo"), (o.mptcp, "mptcp"), (o.unknown, "unknown"), (o.malformed, "bad")];
    for (_, name) in marks.iter().filter(|(set, _)| *set) {
        option(f, format_args!("{name}"))?;
    }
    if separator == "," { f.write_str(">") } else { Ok(()) }
}

fn write_mac(f: &mut fmt::Formatter<'_>, mac: [u8; 6]) -> fmt::Result {
    for (i, byte) in mac.iter().enumerate() {
        write!(f, "{}{byte:02x}", if i == 0 { "" } else { ":" })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
