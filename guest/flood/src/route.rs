//! A route as rtnetlink(7) has it: the kernel's message, of which only the initial window is ever
//! changed.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};

// include/uapi/linux/rtnetlink.h, Linux 6.1.
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_METRICS: u16 = 8;
const RTA_MULTIPATH: u16 = 9;
const RTA_CACHEINFO: u16 = 12;
const RTA_TABLE: u16 = 15;
const RTA_VIA: u16 = 18;
const RTA_ENCAP_TYPE: u16 = 21;
const RTA_ENCAP: u16 = 22;
const RTA_NH_ID: u16 = 30;
const RTAX_INITCWND: u16 = 11;
const AF_INET6: u8 = 10;
const RTN_UNICAST: u8 = 1;
const RTPROT_RA: u8 = 9;
const RT_TABLE_LOCAL: u32 = 255;
const RTM_F_CLONED: u32 = 0x200;
/// RTNH_F_PERVASIVE, RTNH_F_ONLINK: flags with which a route was made. The kernel sets the other
/// flags itself, and refuses them.
const FLAGS_TO_SEND: u8 = 0x02 | 0x04;
/// Bytes of `struct rtmsg`.
const RTMSG: usize = 12;
/// Bytes of `struct rtnexthop`; its flags and interface are at 2 and 4.
const RTNEXTHOP: usize = 8;

/// An attribute's type, with the flags that the kernel gave it (NLA_F_NESTED, and byte order).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Kind(u16);

impl Kind {
    const fn bare(self) -> u16 {
        self.0 & 0x3fff
    }

    const fn is(self, kind: u16) -> bool {
        self.bare() == kind
    }
}

/// See the module doc.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Route {
    header: [u8; RTMSG],
    attributes: Vec<(Kind, Vec<u8>)>,
}

impl Route {
    /// Reads the body of an RTM_NEWROUTE.
    ///
    /// # Errors
    /// It is not one.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let (header, rest) = body.split_first_chunk().context("a route without a header")?;
        Ok(Self { header: *header, attributes: attributes(rest)? })
    }

    /// Whether TCP connections to other machines may take it: unicast, and not of the kernel's
    /// table of local addresses, nor a cache entry. Every link has a route to its link-local
    /// addresses, and all of these look the same.
    #[must_use]
    pub fn is_for_us(&self) -> bool {
        let is_link_local = self.header[0] == AF_INET6
            && self.attribute(RTA_DST).is_some_and(|to| to.starts_with(&[0xfe, 0x80]));
        self.header[7] == RTN_UNICAST
            && self.table() != RT_TABLE_LOCAL
            && !is_link_local
            && u32_at(&self.header, 8).is_some_and(|flags| flags & RTM_F_CLONED == 0)
    }

    /// Whether it would not be the same route any more once it was sent back: the kernel made it
    /// from a router advertisement, or it expires.
    #[must_use]
    pub fn is_kernels_own(&self) -> bool {
        // `rta_expires` in struct rta_cacheinfo.
        let expires = self.attribute(RTA_CACHEINFO).and_then(|info| u32_at(info, 8));
        self.header[5] == RTPROT_RA || expires.is_some_and(|ticks| ticks != 0)
    }

    /// The identity of a route, as `ip route` would write it. Several may have the same.
    #[must_use]
    pub fn name(&self) -> String {
        let mut name = match self.header[0] {
            AF_INET6 => "inet6 ".to_owned(),
            _ => String::new(),
        };
        name += &self.prefix(RTA_DST, self.header[1]).unwrap_or_else(|| "default".to_owned());
        if let Some(from) = self.prefix(RTA_SRC, self.header[2]) {
            let _ = write!(name, " from {from}");
        }
        if self.header[3] != 0 {
            let _ = write!(name, " tos {:#04x}", self.header[3]);
        }
        if let Some(metric) = self.number(RTA_PRIORITY) {
            let _ = write!(name, " metric {metric}");
        }
        match self.table() {
            254 => {}
            table => _ = write!(name, " table {table}"),
        }
        name
    }

    /// The interfaces it leads to.
    #[must_use]
    pub fn outputs(&self) -> Vec<u32> {
        let hops = self.attribute(RTA_MULTIPATH).map(hops).unwrap_or_default();
        let hops = hops.iter().filter_map(|hop| u32_at(hop, 4));
        self.number(RTA_OIF).into_iter().chain(hops).collect()
    }

    /// Whether it leads to other networks: a default route, or one with a gateway.
    #[must_use]
    pub fn leads_away(&self) -> bool {
        let kinds = [RTA_GATEWAY, RTA_VIA, RTA_MULTIPATH];
        self.header[1] == 0 || kinds.into_iter().any(|kind| self.attribute(kind).is_some())
    }

    /// The initial window of connections that take it, in segments, if it has one of its own.
    #[must_use]
    pub fn initcwnd(&self) -> Option<u32> {
        let metrics = attributes(self.attribute(RTA_METRICS)?).ok()?;
        metrics.iter().find(|(kind, _)| kind.is(RTAX_INITCWND)).and_then(|(_, v)| u32_at(v, 0))
    }

    /// The same route with this initial window, or without one of its own.
    ///
    /// # Errors
    /// Its metrics cannot be read.
    pub fn with_initcwnd(&self, segments: Option<u32>) -> Result<Self> {
        let mut metrics = attributes(self.attribute(RTA_METRICS).unwrap_or_default())?;
        metrics.retain(|(kind, _)| !kind.is(RTAX_INITCWND));
        metrics.extend(segments.map(|n| (Kind(RTAX_INITCWND), n.to_ne_bytes().to_vec())));
        let mut route = self.clone();
        route.attributes.retain(|(kind, _)| !kind.is(RTA_METRICS));
        if !metrics.is_empty() {
            route.attributes.push((Kind(RTA_METRICS), emit(&metrics)));
        }
        Ok(route)
    }

    /// The body of a message that makes or deletes it.
    #[must_use]
    pub fn body(&self) -> Vec<u8> {
        let mut header = self.header;
        header[8..].copy_from_slice(&[0; 4]);
        header[8] = self.header[8] & FLAGS_TO_SEND;
        let by_id = self.attribute(RTA_NH_ID).is_some();
        let mut sent = self.attributes.clone();
        sent.retain_mut(|(kind, value)| match kind.bare() {
            RTA_CACHEINFO => false,
            // Both ways of naming a next hop are shown, and only one may be sent.
            RTA_OIF | RTA_GATEWAY | RTA_VIA | RTA_ENCAP | RTA_ENCAP_TYPE => !by_id,
            RTA_MULTIPATH => {
                *value = without_state(value);
                !by_id
            }
            _ => true,
        });
        [&header[..], &emit(&sent)].concat()
    }

    fn table(&self) -> u32 {
        self.number(RTA_TABLE).unwrap_or(u32::from(self.header[4]))
    }

    fn prefix(&self, kind: u16, length: u8) -> Option<String> {
        let bytes = self.attribute(kind)?;
        let address = match (<[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
            (Ok(v4), _) => Ipv4Addr::from(v4).to_string(),
            (_, Ok(v6)) => Ipv6Addr::from(v6).to_string(),
            _ => format!("{bytes:02x?}"),
        };
        Some(format!("{address}/{length}"))
    }

    fn number(&self, kind: u16) -> Option<u32> {
        u32_at(self.attribute(kind)?, 0)
    }

    fn attribute(&self, kind: u16) -> Option<&[u8]> {
        self.attributes.iter().find(|(k, _)| k.is(kind)).map(|(_, value)| value.as_slice())
    }
}

/// The next hops of a multipath route, each with its attributes.
fn hops(mut bytes: &[u8]) -> Vec<&[u8]> {
    let mut hops = Vec::new();
    while let Some(length) = bytes.first_chunk().map(|b| usize::from(u16::from_ne_bytes(*b)))
        && (RTNEXTHOP..=bytes.len()).contains(&length)
    {
        hops.push(&bytes[..length]);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    hops
}

/// The same next hops without the kernel's state of them (dead, link down).
fn without_state(multipath: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for hop in hops(multipath) {
        let at = out.len();
        out.extend_from_slice(hop);
        out[at + 2] &= FLAGS_TO_SEND;
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}

/// Attributes, in order: type and value (netlink(7)).
fn attributes(mut bytes: &[u8]) -> Result<Vec<(Kind, Vec<u8>)>> {
    let mut out = Vec::new();
    while let Some((head, _)) = bytes.split_first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        ensure!((4..=bytes.len()).contains(&length), "an attribute of {length} bytes");
        let kind = Kind(u16::from_ne_bytes([head[2], head[3]]));
        out.push((kind, bytes[4..length].to_vec()));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(out)
}

/// The value of the first attribute of this type in such a list.
pub(crate) fn attribute(list: &[u8], kind: u16) -> Option<Vec<u8>> {
    let mut all = attributes(list).ok()?.into_iter();
    all.find(|(of, _)| of.is(kind)).map(|(_, value)| value)
}

fn emit(attributes: &[(Kind, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (kind, value) in attributes {
        let length = u16::try_from(4 + value.len()).expect("it came from an attribute");
        out.extend_from_slice(&length.to_ne_bytes());
        out.extend_from_slice(&kind.0.to_ne_bytes());
        out.extend_from_slice(value);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    out
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
pub(crate) mod tests;
