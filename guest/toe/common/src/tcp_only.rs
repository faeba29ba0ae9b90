//! Options of sockets that stay native, for the library and for the launcher.

use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET, c_int};

/// A program that sets one of these needs TCP, or a special kind of it: the socket stays native.
/// Urgent data (SO_OOBINLINE), signed or encrypted segments, headers with options, segments of
/// neighbours alone (IP_MINTTL), sockets that are moved, bound to a device or to addresses of
/// others, sent without copies.
pub const TCP_ONLY: [(c_int, c_int); 29] = [
    (SOL_SOCKET, libc::SO_OOBINLINE),
    (SOL_SOCKET, libc::SO_BINDTODEVICE),
    (SOL_SOCKET, libc::SO_BINDTOIFINDEX),
    (SOL_SOCKET, libc::SO_ZEROCOPY),
    (SOL_SOCKET, libc::SO_TIMESTAMPING),
    (SOL_SOCKET, libc::SO_MARK),
    (IPPROTO_IP, libc::IP_OPTIONS),
    (IPPROTO_IP, libc::IP_TRANSPARENT),
    (IPPROTO_IP, libc::IP_MINTTL),
    (IPPROTO_IP, libc::IP_UNICAST_IF),
    (IPPROTO_IP, libc::IP_IPSEC_POLICY),
    (IPPROTO_IP, libc::IP_XFRM_POLICY),
    (IPPROTO_IPV6, libc::IPV6_2292PKTOPTIONS),
    (IPPROTO_IPV6, libc::IPV6_HOPOPTS),
    (IPPROTO_IPV6, libc::IPV6_RTHDRDSTOPTS),
    (IPPROTO_IPV6, libc::IPV6_RTHDR),
    (IPPROTO_IPV6, libc::IPV6_DSTOPTS),
    (IPPROTO_IPV6, libc::IPV6_TRANSPARENT),
    (IPPROTO_IPV6, libc::IPV6_MINHOPCOUNT),
    (IPPROTO_IPV6, libc::IPV6_UNICAST_IF),
    (IPPROTO_IPV6, libc::IPV6_IPSEC_POLICY),
    (IPPROTO_IPV6, libc::IPV6_XFRM_POLICY),
    (IPPROTO_TCP, libc::TCP_MD5SIG),
    (IPPROTO_TCP, TCP_MD5SIG_EXT),
    (IPPROTO_TCP, libc::TCP_REPAIR),
    (IPPROTO_TCP, libc::TCP_ULP),
    (IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT),
    (IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE),
    (IPPROTO_TCP, TCP_AO_ADD_KEY),
];
/// `include/uapi/linux/tcp.h`.
const TCP_MD5SIG_EXT: c_int = 32;
const TCP_ZEROCOPY_RECEIVE: c_int = 35;
const TCP_AO_ADD_KEY: c_int = 38;
