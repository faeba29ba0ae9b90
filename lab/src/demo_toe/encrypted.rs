//! Two daemons more, on the same two hosts, whose streams are encrypted, and a driver without a
//! guest behind each.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use nightporter_guest::bootline::Nic;
use nightporter_guest::peer::{Answer, Ask};

use super::PORT;
use super::ends::{End, InThread};
use crate::daemon::Daemon;
use crate::hosts::{ADDRESSES, Hosts, name, nic};
use crate::process::run;
use crate::vmm::Places;

/// The VMs of its drivers, which no other daemon has.
const VMS: [usize; 2] = [5, 6];
/// Where the others are not: of streams, and the overlay's.
const STREAMS: u16 = 4893;
const OVERLAY: u16 = 4889;

/// See the module's doc.
pub(super) struct Encrypted {
    pub(super) daemons: [Daemon; 2],
    pub(super) drivers: [InThread; 2],
}

impl Encrypted {
    /// Moves the calling thread from host to host.
    pub(super) fn start(hosts: &Hosts, places: Places<'_>) -> Result<Self> {
        let certificates = places.sockets.join("certificates");
        certify(&certificates)?;
        let start = |at: usize| -> Result<_> {
            hosts.machines[at].move_in();
            let dir = places.sockets.join(format!("encrypted{at}"));
            fs::create_dir(&dir).with_context(|| format!("creating {}", dir.display()))?;
            let vm = name(VMS[at]);
            let files = [format!("{vm}.sock"), format!("{vm}-toe.sock")];
            let log = places.logs.join(format!("nightporterd-encrypted{at}.log"));
            let text = configuration(at, &dir, &certificates);
            let daemon = Daemon::start_as(&text, &files, &dir, &log)?;
            let driver = InThread::driving(&daemon.toe_socket(&vm))?;
            Ok((daemon, driver))
        };
        let [(first, client), (second, mut server)] = [start(0)?, start(1)?];
        match server.ask(Ask::Listen { at: at() })? {
            Answer::At { .. } => {}
            other => bail!("listen() at {} gave {other:?}", at()),
        }
        Ok(Self { daemons: [first, second], drivers: [client, server] })
    }

    /// Stops the daemons gracefully.
    pub(super) fn stop(self) -> Result<()> {
        self.daemons.into_iter().try_for_each(Daemon::stop)
    }
}

/// Where the second one's driver listens.
pub(super) fn at() -> std::net::SocketAddr {
    (nic(VMS[1]).address, PORT).into()
}

/// Makes a CA, and a certificate of each host.
fn certify(dir: &Path) -> Result<()> {
    fs::create_dir(dir).with_context(|| format!("creating {}", dir.display()))?;
    let mut script = format!(
        "cd '{}'
        new='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
        openssl req -x509 $new -keyout ca.key -out ca.pem -days 2 -subj /CN=hosts\n",
        dir.display()
    );
    for (at, address) in ADDRESSES.iter().enumerate() {
        let _ = writeln!(
            script,
            "openssl req $new -keyout {at}.key -out csr -subj /O=host
            echo subjectAltName=IP:{address} >ext
            openssl x509 -req -in csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
                -extfile ext -out {at}.pem"
        );
    }
    run("sh", &["-ec", &script]).context("making certificates by openssl")?;
    Ok(())
}

fn configuration(at: usize, dir: &Path, certificates: &Path) -> String {
    let [local, peer] = [ADDRESSES[at], ADDRESSES[1 - at]];
    let (own, files) = (dir.display(), certificates.display());
    let mut text = format!(
        "[daemon]\ncontrol = \"{own}/control.sock\"\narena = \"{own}/arena\"\nmetrics = \"off\"\n\
         drain_timeout_s = 2\nlog = \"info\"\n\n\
         [toe]\nport = {STREAMS}\nencrypt = true\nca = \"{files}/ca.pem\"\n\
         certificate = \"{files}/{at}.pem\"\nkey = \"{files}/{at}.key\"\n\n\
         [[overlay]]\nname = \"between\"\nvni = 43\nlocal = \"{local}:{OVERLAY}\"\n\
         peers = [\"{peer}:{OVERLAY}\"]\n"
    );
    for (vm, host) in VMS.into_iter().zip(ADDRESSES) {
        let Nic { mac, address, .. } = nic(vm);
        let _ = write!(
            text,
            "\n[[station]]\nvni = 43\nmac = \"{mac}\"\nhost = \"{host}\"\nips = [\"{address}\"]\n"
        );
    }
    let (vm, Nic { mac, address, .. }) = (name(VMS[at]), nic(VMS[at]));
    let _ = write!(
        text,
        "\n[[vm]]\nname = \"{vm}\"\nsocket = \"{own}/{vm}.sock\"\nmac = \"{mac}\"\n\
         ips = [\"{address}\"]\ntoe = true\n"
    );
    text
}
