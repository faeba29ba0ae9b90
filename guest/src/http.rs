//! A sink for HTTP uploads, so that clients that were not written for the lab can send to a guest.
//!
//! It reads a request with a `Content-Length` to its end, answers 200 and closes. It supports
//! nothing else of HTTP.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

use anyhow::{Context, Result};
use nightporter_guest::data::HTTP_PORT;

/// Listens on every address and serves one client at a time for ever.
pub(crate) fn start() -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, HTTP_PORT))
        .with_context(|| format!("listening on port {HTTP_PORT}"))?;
    thread::spawn(move || {
        let mut chunk = vec![1; 1 << 18]; // touched, as the data port's buffers are
        for stream in listener.incoming() {
            if let Err(error) = stream.and_then(|stream| request(&stream, &mut chunk)) {
                eprintln!("nightporter-lab-guest: HTTP: {error}");
            }
        }
    });
    Ok(())
}

fn request(stream: &TcpStream, chunk: &mut [u8]) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut left, mut line) = (None, String::new());
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        match line.trim_end().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("content-length") => {
                left = value.trim().parse::<u64>().ok();
            }
            Some((name, _)) if name.eq_ignore_ascii_case("expect") => {
                (&*stream).write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
            }
            None if line.trim_end().is_empty() => break,
            _ => {}
        }
    }
    let mut left = left.ok_or(ErrorKind::InvalidData)?;
    while left > 0 {
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
        left -= match reader.read(&mut chunk[..wanted])? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            len => len as u64,
        };
    }
    (&*stream).write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}
