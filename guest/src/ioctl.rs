//! Interface addresses, flags and neighbours by ioctl (netdevice(7), arp(7)).

use std::io;
use std::mem;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, ensure};
use libc::{arpreq, c_char, c_short, ifreq, sockaddr, sockaddr_in};
use nightporter_guest::bootline::Neighbour;

nix::ioctl_write_ptr_bad!(set_address, libc::SIOCSIFADDR, ifreq);
nix::ioctl_write_ptr_bad!(set_netmask, libc::SIOCSIFNETMASK, ifreq);
nix::ioctl_write_ptr_bad!(set_flags, libc::SIOCSIFFLAGS, ifreq);
nix::ioctl_write_ptr_bad!(set_arp, libc::SIOCSARP, arpreq);

#[expect(clippy::cast_possible_truncation, reason = "bit 0, in the width struct ifreq gives it")]
const IFF_UP: c_short = libc::IFF_UP as c_short;

#[expect(clippy::cast_possible_truncation, reason = "2, in the width struct sockaddr gives it")]
const AF_INET: libc::sa_family_t = libc::AF_INET as libc::sa_family_t;

/// Gives an interface its address and takes it up.
pub(crate) fn bring_up(name: &str, address: Ipv4Addr, prefix: u8) -> Result<()> {
    ensure!(prefix <= 32, "prefix length {prefix}");
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?; // any socket carries these ioctls
    let fd = socket.as_raw_fd();
    let mut request = ifreq_for(name)?;
    request.ifr_ifru.ifru_addr = ipv4(address);
    // SAFETY: `request` is a valid ifreq that names the interface and holds an AF_INET address.
    unsafe { set_address(fd, &raw const request) }.with_context(|| format!("{name}: address"))?;
    request.ifr_ifru.ifru_addr = ipv4(Ipv4Addr::from(netmask(prefix)));
    // SAFETY: as above, with a netmask.
    unsafe { set_netmask(fd, &raw const request) }.with_context(|| format!("{name}: netmask"))?;
    request.ifr_ifru.ifru_flags = IFF_UP;
    // SAFETY: as above, with flags.
    unsafe { set_flags(fd, &raw const request) }.with_context(|| format!("{name}: up"))?;
    Ok(())
}

/// Adds a permanent neighbour to an interface.
pub(crate) fn add_neighbour(name: &str, neighbour: &Neighbour) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    let fd = socket.as_raw_fd();
    // SAFETY: arpreq is plain data for which all zeros is a value.
    let mut request: arpreq = unsafe { mem::zeroed() };
    request.arp_pa = ipv4(neighbour.address);
    request.arp_ha.sa_family = libc::ARPHRD_ETHER;
    copy_chars(&mut request.arp_ha.sa_data, &neighbour.mac.0);
    request.arp_flags = libc::ATF_COM | libc::ATF_PERM;
    copy_chars(&mut request.arp_dev, name.as_bytes());
    // SAFETY: `request` is a valid arpreq whose device name is NUL-terminated (`ifreq_for` checked
    // its length when the interface came up).
    unsafe { set_arp(fd, &raw const request) }
        .with_context(|| format!("{name}: neighbour {neighbour}"))?;
    Ok(())
}

fn ifreq_for(name: &str) -> io::Result<ifreq> {
    // SAFETY: ifreq is plain data for which all zeros is a value.
    let mut request: ifreq = unsafe { mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "interface name too long"));
    }
    copy_chars(&mut request.ifr_name, name.as_bytes());
    Ok(request)
}

fn copy_chars(to: &mut [c_char], from: &[u8]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.cast_signed();
    }
}

fn ipv4(address: Ipv4Addr) -> sockaddr {
    // SAFETY: sockaddr_in is plain data for which all zeros is a value.
    let mut inet: sockaddr_in = unsafe { mem::zeroed() };
    inet.sin_family = AF_INET;
    inet.sin_addr.s_addr = u32::from(address).to_be();
    // SAFETY: both are 16 bytes of plain data; this is the cast every caller of bind() makes.
    unsafe { mem::transmute(inet) }
}

/// The mask of a prefix length of at most 32.
pub(crate) fn netmask(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)
}
