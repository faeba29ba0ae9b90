//! `nightporter-guest watch`.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use etherparse::{LaxSlicedPacket, TransportSlice};
use nix::sys::signal::Signal;
use pcap_file::pcap::PcapReader;

use crate::world::{World, ip, signal_process};

/// Bytes of a connection.
const BYTES: usize = 200_000;

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

/// Carries data over loopback from one end of a connection to the other, which has this port.
fn carry(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut sender = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let (mut receiver, _) = listener.accept().unwrap();
    let sending = std::thread::spawn(move || sender.write_all(&[7; BYTES]).unwrap());
    assert_eq!(receiver.read_to_end(&mut Vec::new()).unwrap(), BYTES);
    sending.join().unwrap();
}

#[test]
#[ignore = "needs root: it captures frames"]
fn a_capture_has_the_headers_of_the_chosen_connections_and_the_kernels_times() {
    World::run(|world| {
        ip("link set lo up");
        let name = format!("np-watching-{}.pcap", std::process::id());
        let file = std::env::temp_dir().join(name);
        let mut command = world.command(&format!("watch lo --port 5001 -w {}", file.display()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (mut input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut lines = BufReader::new(output).lines();
        let mut ask = || {
            input.write_all(b"\n").unwrap();
            lines.next().unwrap().unwrap()
        };
        assert_eq!(ask(), "0 frames, 0 missed");
        let before = since_1970();
        carry(5002);
        carry(5001);
        let after = since_1970();
        let said = ask();
        let mut reader = PcapReader::new(File::open(&file).unwrap()).unwrap();
        std::fs::remove_file(&file).unwrap(); // it is open
        let (mut frames, mut payload, mut last) = (0, 0, before);
        while let Some(packet) = reader.next_packet() {
            let packet = packet.unwrap();
            let sliced = LaxSlicedPacket::from_ethernet(&packet.data).unwrap();
            let Some(TransportSlice::Tcp(tcp)) = sliced.transport else { panic!("{sliced:?}") };
            assert!(tcp.source_port() == 5001 || tcp.destination_port() == 5001);
            let headers = 14 + 20 + usize::from(tcp.data_offset()) * 4;
            payload += packet.orig_len as usize - headers;
            assert_eq!(packet.data.len(), 128.min(packet.orig_len as usize));
            assert!(packet.timestamp >= last, "{:?} after {last:?}", packet.timestamp);
            last = packet.timestamp;
            frames += 1;
        }
        assert!(last <= after, "stamped when it passed, not when it was read");
        // Loopback shows a frame when it leaves and when it comes.
        assert_eq!(payload, 2 * BYTES);
        assert_eq!(said, format!("{frames} frames, 0 missed"));
        drop(input); // the end of its input is not its end
        signal_process(child.id(), Signal::SIGTERM);
        let ended = child.wait_with_output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
        assert_eq!(String::from_utf8_lossy(&ended.stderr), format!("{said}\n"));
    });
}

#[test]
#[ignore = "needs root: it captures frames"]
fn a_capture_ends_after_its_time_and_names_an_interface_that_is_not_there() {
    World::run(|world| {
        ip("link set lo up");
        let ended = world.tool("watch lo --for 0s -w -");
        assert!(ended.status.success(), "{ended:?}");
        assert!(PcapReader::new(&ended.stdout[..]).unwrap().next_packet().is_none());
        let refused = world.tool("watch nic7 -w -");
        let why = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && why.contains("listening on nic7: "), "{why}");
    });
}
