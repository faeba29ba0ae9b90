//! Data: both ways, by every call that moves it, with every option.

use std::io::{IoSlice, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;
use std::time::Duration;

use libc::{IPPROTO_TCP, SOL_SOCKET};
use nix::fcntl::{FcntlArg, FdFlag, SpliceFFlags, fcntl, splice};
use nix::sys::sendfile::sendfile;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, recv, recvmsg, send, sendmsg,
};
use nix::unistd::{dup, pipe};

use crate::fork::{in_a_child, option, owned, set_option, unread};
use crate::{Place, all_of, pattern, says, told};

/// Bytes of a stream that is large.
const LARGE: usize = 3_000_000;

pub(crate) fn run(place: &Place) {
    both_ways(place);
    names(place);
    copies(place);
    calls(place);
    files(place);
    options(place);
    descriptors_sent(place);
}

fn both_ways(place: &Place) {
    let (mut client, mut server) = place.pair();
    let echo = thread::spawn(move || {
        let mut bytes = vec![0; 70_001];
        loop {
            match server.read(&mut bytes).expect("read") {
                0 => break,
                got => server.write_all(&bytes[..got]).expect("written"),
            }
        }
        server
    });
    let sent = pattern(LARGE);
    let mut writer = client.try_clone().expect("a second one");
    let expected = sent.clone();
    let writing = thread::spawn(move || {
        for (i, part) in sent.chunks(1 + 4_999 * 7).enumerate() {
            // Some of it in small pieces.
            let cut = part.len().min(i * 13 % 97);
            writer.write_all(&part[..cut]).expect("written");
            writer.write_all(&part[cut..]).expect("written");
        }
        writer.shutdown(Shutdown::Write).expect("shut");
    });
    let mut back = vec![0; LARGE];
    says("an echo comes back", told(client.read_exact(&mut back)));
    says("it is the same", back == expected);
    writing.join().expect("written");
    drop(echo.join().expect("echoed"));
    says("then it ends", all_of(&mut client));
}

fn names(place: &Place) {
    let (client, server) = place.pair();
    let (own, peer) = (client.local_addr(), client.peer_addr());
    says("the client's own address", told(own).map(|a| a.ip()));
    says("is what the server sees", client.local_addr().ok() == server.peer_addr().ok());
    says("and the other way round", told(peer).ok() == server.local_addr().ok());
    let two = client.try_clone().expect("a second one");
    says("a copy has the same", two.local_addr().ok() == client.local_addr().ok());
}

fn copies(place: &Place) {
    let (client, mut server) = place.pair();
    let copy = TcpStream::from(dup(client.as_fd()).expect("a copy"));
    drop(client);
    let mut copy = copy;
    copy.write_all(b"by a copy").expect("written");
    let mut bytes = [0; 9];
    server.read_exact(&mut bytes).expect("read");
    says("a copy outlives the first", String::from_utf8_lossy(&bytes));

    server.write_all(b"fork").expect("written");
    let ended = in_a_child(|| {
        let mut bytes = [0; 4];
        copy.read_exact(&mut bytes).expect("read");
        copy.write_all(&bytes).expect("written");
    });
    says("a child has it", matches!(ended, nix::sys::wait::WaitStatus::Exited(_, 0)));
    let mut bytes = [0; 4];
    server.read_exact(&mut bytes).expect("read");
    says("and writes", String::from_utf8_lossy(&bytes));

    fcntl(copy.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).expect("inherited");
    server.write_all(b"exec!").expect("written");
    let mut suite = Command::new("/proc/self/exe");
    let status = suite.args(["--inherited", &copy.as_raw_fd().to_string()]).status();
    says("a program that inherits it", status.expect("it ran").success());
    drop(copy);
    let text = all_of(&mut server).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    says("says who is who", text);
}

fn calls(place: &Place) {
    let (mut client, mut server) = place.pair();
    let parts = [IoSlice::new(b"one"), IoSlice::new(b"two"), IoSlice::new(b"three")];
    says("writev", told(client.write_vectored(&parts)));
    let (fd, mut bytes) = (server.as_raw_fd(), [0; 16]);
    says("MSG_PEEK", recv(fd, &mut bytes[..6], MsgFlags::MSG_PEEK));
    says("FIONREAD", unread(fd));
    let (mut one, mut two) = ([0; 3], [0; 8]);
    let mut into = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
    says("readv", told(server.read_vectored(&mut into)));
    says("has what was peeked at", (one, two, &bytes[..6] == b"onetwo"));
    says("nothing is left", recv(fd, &mut bytes, MsgFlags::MSG_DONTWAIT));
    let sent = sendmsg::<()>(client.as_raw_fd(), &parts, &[], MsgFlags::MSG_NOSIGNAL, None);
    says("sendmsg", sent);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let got = recvmsg::<()>(fd, &mut into, None, MsgFlags::empty()).map(|got| got.bytes);
    says("recvmsg", got);
    let more = MsgFlags::from_bits_retain(libc::MSG_MORE);
    says("send", send(fd, b"12345678", more));
    says("send", send(fd, b"9", MsgFlags::empty()));
    let waited = recv(client.as_raw_fd(), &mut bytes[..9], MsgFlags::MSG_WAITALL);
    says("MSG_WAITALL", waited);
}

fn files(place: &Place) {
    let (client, mut server) = place.pair();
    let path = std::env::temp_dir().join(format!("toe-suite-{}", std::process::id()));
    let open = || std::fs::File::options().read(true).write(true).create_new(true).open(&path);
    let mut file = open().expect("a file");
    std::fs::remove_file(&path).expect("without a name");
    file.write_all(&pattern(300_000)).expect("written");
    file.seek(SeekFrom::Start(0)).expect("back");
    let sending = thread::spawn(move || {
        let mut sent = 0;
        while let Ok(more @ 1..) = sendfile(&client, &file, None, 100_000) {
            sent += more;
        }
        sent
    });
    let (read, write) = pipe().expect("a pipe");
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    while let Ok(more @ 1..) = splice(&server, None, &write, None, 4096, SpliceFFlags::empty()) {
        nix::unistd::read(&read, &mut part[..more]).expect("read");
        bytes.extend_from_slice(&part[..more]);
    }
    says("sendfile", sending.join().expect("sent"));
    says("splice gives all of it", bytes == pattern(300_000));
    nix::unistd::write(&write, b"by splice").expect("written");
    let (client, mut other) = place.pair();
    says("splice", splice(&read, None, &client, None, 9, SpliceFFlags::empty()));
    drop(client);
    says("arrives", all_of(&mut other));
    says("and then it ends", server.read(&mut part).expect("read"));
}

fn options(place: &Place) {
    let (client, server) = place.pair();
    for (name, stream) in [("connected", &client), ("accepted", &server)] {
        let fd = stream.as_raw_fd();
        says(name, ());
        says("SO_TYPE", option(fd, SOL_SOCKET, libc::SO_TYPE));
        says("SO_DOMAIN", option(fd, SOL_SOCKET, libc::SO_DOMAIN));
        says("SO_PROTOCOL", option(fd, SOL_SOCKET, libc::SO_PROTOCOL));
        says("SO_ACCEPTCONN", option(fd, SOL_SOCKET, libc::SO_ACCEPTCONN));
        says("SO_ERROR", option(fd, SOL_SOCKET, libc::SO_ERROR));
        says("TCP_NODELAY", option(fd, IPPROTO_TCP, libc::TCP_NODELAY));
        for (level, option_name, value) in [
            (IPPROTO_TCP, libc::TCP_NODELAY, 1),
            (IPPROTO_TCP, libc::TCP_KEEPIDLE, 77),
            (IPPROTO_TCP, libc::TCP_KEEPINTVL, 0),
            (IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 12_345),
            (SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (SOL_SOCKET, libc::SO_SNDBUF, 100_000),
            (SOL_SOCKET, libc::SO_REUSEADDR, 1),
            (libc::IPPROTO_IP, libc::IP_TOS, 16),
            (IPPROTO_TCP, 999, 1),
        ] {
            let set = set_option(fd, level, option_name, value);
            says("set and got", (level, option_name, set, option(fd, level, option_name)));
        }
        let state = option(fd, IPPROTO_TCP, libc::TCP_INFO).map(|word| word & 0xff);
        says("TCP_INFO has the state", state);
        says("read timeout", told(stream.set_read_timeout(Some(Duration::from_millis(20)))));
        says("is", told(stream.read_timeout()));
        let mut byte = [0];
        let mut reader = stream;
        says("and it comes", told(reader.read(&mut byte)));
    }
}

fn descriptors_sent(place: &Place) {
    let (client, mut server) = place.pair();
    let (left, right) = UnixStream::pair().expect("a pair");
    let fds = [client.as_raw_fd()];
    let (data, rights) = ([IoSlice::new(b"x")], [ControlMessage::ScmRights(&fds)]);
    sendmsg::<()>(left.as_raw_fd(), &data, &rights, MsgFlags::empty(), None).expect("sent");
    drop(client);
    let (mut byte, mut space) = ([0], nix::cmsg_space!(i32));
    let mut into = [IoSliceMut::new(&mut byte)];
    let got = recvmsg::<()>(right.as_raw_fd(), &mut into, Some(&mut space), MsgFlags::empty());
    let got = got.expect("a message");
    let Some(ControlMessageOwned::ScmRights(fds)) = got.cmsgs().expect("whole").next() else {
        return says("SCM_RIGHTS", "no descriptor");
    };
    let mut came = TcpStream::from(owned(fds[0]));
    says("SCM_RIGHTS brings it", came.peer_addr().ok() == server.local_addr().ok());
    came.write_all(b"and it works").expect("written");
    drop(came);
    says("to somebody who", all_of(&mut server).map(|b| String::from_utf8_lossy(&b).into_owned()));
}
