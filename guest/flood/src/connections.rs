//! The existing TCP connections, with their windows: sock_diag(7).

use anyhow::{Context, Result};
use nix::sys::socket::{SockFlag, SockProtocol};

use crate::netlink::{NLM_F_DUMP, NLMSG_DONE, Netlink};
use crate::route::{attribute, u32_at};

// include/uapi/linux/sock_diag.h and inet_diag.h, Linux 6.1.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_INFO: u16 = 2;
const IPPROTO_TCP: u8 = 6;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// Bytes of `struct inet_diag_req_v2`.
const REQUEST: usize = 56;
/// Bytes of `struct inet_diag_msg`. Its state is at 1, its addresses at 8 and 24, its cookie at 44.
const MESSAGE: usize = 72;
/// `tcpi_snd_cwnd` in `struct tcp_info`.
const WINDOW_AT: usize = 80;
/// States whose windows are read when their handshakes end (include/net/tcp_states.h): SYN_SENT,
/// SYN_RECV.
const OPENING: [u8; 2] = [2, 3];
/// States that may send: those, ESTABLISHED, FIN_WAIT1, CLOSE_WAIT, LAST_ACK and CLOSING.
const STATES: u32 = 1 << OPENING[0] | 1 << OPENING[1] | 1 << 1 | 1 << 4 | 1 << 8 | 1 << 9 | 1 << 11;

/// A connection that may send.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Connection {
    /// The kernel gives each one, which it keeps, and none twice.
    pub cookie: u64,
    /// Its congestion window, in segments. `None`: it is in its handshake, and has none yet.
    pub window: Option<u32>,
}

/// Those of this network namespace, but for those to its own address.
///
/// # Errors
/// The kernel cannot tell: it has no `tcp_diag`.
pub fn connections() -> Result<Vec<Connection>> {
    let netlink = Netlink::open(SockProtocol::NetlinkSockDiag, 0, SockFlag::empty())?;
    let mut all = Vec::new();
    for family in [AF_INET, AF_INET6] {
        let mut request = [0; REQUEST];
        request[..3].copy_from_slice(&[family, IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1)]);
        request[4..8].copy_from_slice(&STATES.to_ne_bytes());
        netlink.send(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &request)?;
        netlink
            .answers(|kind, _, body| {
                if kind == SOCK_DIAG_BY_FAMILY && !is_to_itself(body) {
                    all.push(parse(body).context("a connection that makes no sense")?);
                }
                Ok(kind == NLMSG_DONE)
            })
            .context("listing connections (tcp_diag)")?;
    }
    Ok(all)
}

fn is_to_itself(body: &[u8]) -> bool {
    matches!((body.get(8..24), body.get(24..40)), (Some(from), Some(to)) if from == to)
}

fn parse(body: &[u8]) -> Option<Connection> {
    let cookie = u64::from_ne_bytes(*body.get(44..)?.first_chunk()?);
    if OPENING.contains(body.get(1)?) {
        return Some(Connection { cookie, window: None });
    }
    let info = attribute(body.get(MESSAGE..)?, INET_DIAG_INFO)?;
    Some(Connection { cookie, window: Some(u32_at(&info, WINDOW_AT)?) })
}
