//! One connection: the socket as a link wants it, and the handshake's bytes on it.

use crate::handshake::{
    ANSWER_BYTES, Answer, AnswerHead, HELLO_BYTES, HandshakeError, Hello, HelloHead,
};
use crate::heard::Listening;
use socket2::SockRef;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

/// TLS reads its socket 4 KiB at a time; the buffer between saves most of the system calls.
pub(crate) type Socket = BufReader<Listening>;

/// A connection after TLS. Boxed, as it is more than a kilobyte and handed around.
pub(crate) type Wire = Box<TlsStream<Socket>>;

const SOCKET_BUFFER_BYTES: usize = 64 << 10;

/// What the kernel may hold unsent: a few milliseconds of a fast link, so that a connection never
/// runs dry and what is urgent never waits long behind what was written before.
const UNSENT_BYTES_MAX: u32 = 256 << 10;

/// Bytes that TLS takes before it wants to write them: a whole frame in one go.
const TLS_BUFFER_BYTES: usize = 512 << 10;

/// How long a peer that is turned away has to read why.
const PARTING: Duration = Duration::from_secs(1);

/// Why a handshake went wrong.
pub(crate) enum Broken {
    Io(io::Error),
    Handshake(HandshakeError),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Broken {
        Broken::Io(error)
    }
}

impl From<HandshakeError> for Broken {
    fn from(error: HandshakeError) -> Broken {
        Broken::Handshake(error)
    }
}

/// A socket for TLS.
pub(crate) fn socket(tcp: TcpStream) -> io::Result<Socket> {
    tcp.set_nodelay(true)?;
    let options = SockRef::from(&tcp);
    // Where a kernel has neither, links are slower over lossy or long lines, and work.
    let _ = options.set_tcp_congestion(b"bbr");
    let _ = options.set_tcp_notsent_lowat(UNSENT_BYTES_MAX);
    Ok(BufReader::with_capacity(SOCKET_BUFFER_BYTES, Listening::to(tcp)))
}

/// A connection whose TLS is up.
pub(crate) fn wire(tls: impl Into<TlsStream<Socket>>) -> Wire {
    let mut wire = Box::new(tls.into());
    let limit = Some(TLS_BUFFER_BYTES);
    match &mut *wire {
        TlsStream::Client(client) => client.get_mut().1.set_buffer_limit(limit),
        TlsStream::Server(server) => server.get_mut().1.set_buffer_limit(limit),
    }
    wire
}

pub(crate) async fn say_hello(wire: &mut Wire, hello: &Hello) -> io::Result<()> {
    wire.write_all(&hello.encode()).await?;
    wire.flush().await
}

pub(crate) async fn hear_hello(wire: &mut Wire) -> Result<Hello, Broken> {
    let mut head = [0; HELLO_BYTES];
    wire.read_exact(&mut head).await?;
    let head = HelloHead::decode(&head)?;
    let mut request = vec![0; head.request_bytes];
    wire.read_exact(&mut request).await?;
    Ok(head.complete(request)?)
}

pub(crate) async fn say_answer(wire: &mut Wire, answer: &Answer) -> io::Result<()> {
    wire.write_all(&answer.encode()).await?;
    wire.flush().await
}

pub(crate) async fn hear_answer(wire: &mut Wire) -> Result<Answer, Broken> {
    let mut head = [0; ANSWER_BYTES];
    wire.read_exact(&mut head).await?;
    let head = AnswerHead::decode(&head)?;
    let mut words = vec![0; head.words_bytes];
    wire.read_exact(&mut words).await?;
    Ok(head.complete(&words)?)
}

/// Closes a connection so that what was written last arrives: a socket closed with bytes unread
/// makes the peer's kernel throw away what it has not delivered yet.
pub(crate) async fn part(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let _ = tokio::time::timeout(PARTING, async {
        if stream.shutdown().await.is_ok() {
            discard(&mut stream).await;
        }
    })
    .await;
}

/// Reads to the end and forgets it.
pub(crate) async fn discard(stream: &mut (impl AsyncRead + Unpin)) {
    let mut scratch = [0; 8 << 10];
    while let Ok(1..) = stream.read(&mut scratch).await {}
}

/// Turns a peer away.
pub(crate) async fn refuse(mut wire: Wire, why: String) {
    let answer = Answer::Refused { why };
    if let Ok(Ok(())) = tokio::time::timeout(PARTING, say_answer(&mut wire, &answer)).await {
        part(wire).await;
    }
}
