//! The guest's configuration on its kernel command line.
//!
//! ```text
//! np.control=ttyS1                            serial port of the control channel
//! np.nic=52:54:00:00:01:01,10.77.1.11/24      one per NIC, in order
//! np.neigh=10.77.1.1,02:00:00:00:00:01        a permanent neighbour (no ARP while measuring)
//! ```

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use anyhow::{Context, Error, ensure};

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parts: Vec<&str> = text.split(':').collect();
        ensure!(parts.len() == 6, "{text:?} is not an Ethernet address");
        let mut mac = [0; 6];
        for (byte, part) in mac.iter_mut().zip(parts) {
            *byte = u8::from_str_radix(part, 16)
                .with_context(|| format!("{text:?} is not an Ethernet address"))?;
        }
        Ok(Self(mac))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// One NIC: which device, which address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nic {
    /// Finds the device.
    pub mac: Mac,
    /// Address to give it.
    pub address: Ipv4Addr,
    /// Prefix length of its subnet.
    pub prefix: u8,
}

impl FromStr for Nic {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (mac, net) = text.split_once(',').with_context(|| format!("np.nic={text}: no ','"))?;
        let (address, prefix) =
            net.split_once('/').with_context(|| format!("np.nic={text}: no '/'"))?;
        Ok(Self { mac: mac.parse()?, address: address.parse()?, prefix: prefix.parse()? })
    }
}

impl fmt::Display for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}/{}", self.mac, self.address, self.prefix)
    }
}

/// A permanent neighbour entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    /// Its Ethernet address.
    pub mac: Mac,
}

impl FromStr for Neighbour {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (address, mac) =
            text.split_once(',').with_context(|| format!("np.neigh={text}: no ','"))?;
        Ok(Self { address: address.parse()?, mac: mac.parse()? })
    }
}

impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.address, self.mac)
    }
}

/// The lab's words on a kernel command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bootline {
    /// Name under /dev of the control channel's serial port.
    pub control: String,
    /// The guest's NICs, in order.
    pub nics: Vec<Nic>,
    /// Hosts the guest shall know without asking.
    pub neighbours: Vec<Neighbour>,
}

impl FromStr for Bootline {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut line = Self::default();
        for word in text.split_whitespace() {
            match word.split_once('=') {
                Some(("np.control", value)) => line.control = value.to_owned(),
                Some(("np.nic", value)) => line.nics.push(value.parse()?),
                Some(("np.neigh", value)) => line.neighbours.push(value.parse()?),
                _ => {} // the kernel's own words
            }
        }
        ensure!(!line.control.is_empty(), "no np.control= on the kernel command line");
        Ok(line)
    }
}

impl fmt::Display for Bootline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "np.control={}", self.control)?;
        self.nics.iter().try_for_each(|nic| write!(f, " np.nic={nic}"))?;
        self.neighbours.iter().try_for_each(|neighbour| write!(f, " np.neigh={neighbour}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bootline_survives_the_kernel_command_line() {
        let line = Bootline {
            control: "ttyS1".to_owned(),
            nics: vec![Nic {
                mac: Mac([0x52, 0x54, 0, 0, 1, 0xab]),
                address: Ipv4Addr::new(10, 77, 1, 11),
                prefix: 24,
            }],
            neighbours: vec![Neighbour {
                address: Ipv4Addr::new(10, 77, 1, 1),
                mac: Mac([2, 0, 0, 0, 0, 1]),
            }],
        };
        let cmdline = format!("console=ttyS0 quiet {line} panic=1");
        assert_eq!(cmdline.parse::<Bootline>().expect("parses"), line);
    }

    #[test]
    fn a_nic_without_a_prefix_length_is_an_error_not_a_default() {
        assert!("np.control=a np.nic=52:54:00:00:00:01,10.0.0.1".parse::<Bootline>().is_err());
    }
}
