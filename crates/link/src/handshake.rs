//! What both sides say on a new connection before the first frame. Pure and total. Numbers are
//! little-endian; `docs/formats/link.md` draws the bytes.

/// First bytes of a connection, both ways.
pub const MAGIC: [u8; 8] = *b"FARSHLNK";

/// Lowest protocol version that this build speaks.
pub const VERSION_MIN: u16 = 2;

/// Highest protocol version that this build speaks.
pub const VERSION_MAX: u16 = 2;

/// Bytes of a hello before the request.
pub const HELLO_BYTES: usize = 48;

/// Bytes of an answer before its text.
pub const ANSWER_BYTES: usize = 28;

/// Most bytes of a request.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Most bytes of the words of a refusal; longer ones are cut.
pub const WORDS_BYTES_MAX: usize = 4 << 10;

/// Most connections of one session.
pub const CONNECTIONS_MAX: usize = 16;

/// Least credit of a session: two of the largest pieces.
pub const WINDOW_BYTES_MIN: u64 = 512 << 10;

/// Most credit of a session.
pub const WINDOW_BYTES_MAX: u64 = 1 << 30;

/// Names a session while its connections come together.
pub type SessionId = [u8; 16];

/// What the dialer says first on each connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Lowest protocol version the dialer speaks.
    pub version_min: u16,
    /// Highest protocol version the dialer speaks.
    pub version_max: u16,
    /// Which of the session's connections this is, from 0.
    pub stripe: u8,
    /// How many there will be.
    pub stripes: u8,
    /// The session.
    pub session: SessionId,
    /// Credit the dialer gives, in the units of [`crate::frame::cost`].
    pub window_bytes: u64,
    /// What is asked for; empty but on connection 0.
    pub request: Vec<u8>,
}

/// What the listener says to a hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To each connection: frames follow.
    Accepted {
        /// The version spoken from here on.
        version: u16,
        /// Credit the listener gives.
        window_bytes: u64,
    },
    /// The connection is over.
    Refused {
        /// Why, for people.
        why: String,
    },
}

/// Why bytes are not a handshake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// Another protocol.
    #[error("it does not speak Farshore's link protocol (its first bytes are {0:02x?})")]
    Magic([u8; 8]),
    /// No version in common.
    #[error(
        "it speaks versions {min} to {max} of the link protocol, this farshore {VERSION_MIN} to {VERSION_MAX}: upgrade the older one"
    )]
    Version {
        /// Its lowest.
        min: u16,
        /// Its highest.
        max: u16,
    },
    /// A request longer than any may be.
    #[error("its request has {0} bytes; {REQUEST_BYTES_MAX} are allowed")]
    RequestTooLong(u32),
    /// Anything else out of bounds.
    #[error("its handshake is malformed: {0}")]
    Malformed(&'static str),
    /// Changed on the way.
    #[error("its handshake has checksum {found:08x}, not {announced:08x} as it says")]
    Checksum {
        /// As sent.
        announced: u32,
        /// Over what arrived.
        found: u32,
    },
}

/// The head of a hello, and how many bytes of request follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HelloHead {
    hello: Hello,
    /// Bytes that follow.
    pub request_bytes: usize,
    checksum_so_far: u32,
    checksum: u32,
}

impl Hello {
    /// The bytes. The request must not be longer than [`REQUEST_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HELLO_BYTES + self.request.len());
        bytes.extend(MAGIC);
        bytes.extend(self.version_min.to_le_bytes());
        bytes.extend(self.version_max.to_le_bytes());
        bytes.extend([self.stripe, self.stripes, 0, 0]);
        bytes.extend(self.session);
        bytes.extend(self.window_bytes.to_le_bytes());
        bytes.extend((self.request.len() as u32).to_le_bytes());
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&bytes), &self.request);
        bytes.extend(checksum.to_le_bytes());
        bytes.extend(&self.request);
        bytes
    }
}

impl HelloHead {
    /// Reads the head. Magic and versions come first, so that strangers and other versions are
    /// told as such.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<HelloHead, HandshakeError> {
        check_magic(bytes)?;
        let (version_min, version_max) = (u16_at(bytes, 8), u16_at(bytes, 10));
        if version_min > version_max {
            return Err(HandshakeError::Malformed("its lowest version is above its highest"));
        }
        if version_max < VERSION_MIN || version_min > VERSION_MAX {
            return Err(HandshakeError::Version { min: version_min, max: version_max });
        }
        let (stripe, stripes) = (bytes[12], bytes[13]);
        if stripe >= stripes || usize::from(stripes) > CONNECTIONS_MAX {
            return Err(HandshakeError::Malformed("numbers of connections out of bounds"));
        }
        if bytes[14..16] != [0; 2] {
            return Err(HandshakeError::Malformed("a reserved field is set"));
        }
        let window_bytes = window_at(bytes, 32)?;
        let request_bytes = u32_at(bytes, 40);
        if request_bytes as usize > REQUEST_BYTES_MAX {
            return Err(HandshakeError::RequestTooLong(request_bytes));
        }
        if stripe > 0 && request_bytes > 0 {
            return Err(HandshakeError::Malformed("a request on a further connection"));
        }
        let mut session = SessionId::default();
        session.copy_from_slice(&bytes[16..32]);
        Ok(HelloHead {
            hello: Hello {
                version_min,
                version_max,
                stripe,
                stripes,
                session,
                window_bytes,
                request: Vec::new(),
            },
            request_bytes: request_bytes as usize,
            checksum_so_far: crc32c::crc32c(&bytes[..44]),
            checksum: u32_at(bytes, 44),
        })
    }

    /// The whole, once the request has been read.
    pub fn complete(self, request: Vec<u8>) -> Result<Hello, HandshakeError> {
        check_sum(self.checksum, crc32c::crc32c_append(self.checksum_so_far, &request))?;
        Ok(Hello { request, ..self.hello })
    }
}

/// The head of an answer, and how many bytes of text follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    version: u16,
    status: u8,
    /// Bytes that follow.
    pub words_bytes: usize,
    window_bytes: u64,
    checksum_so_far: u32,
    checksum: u32,
}

impl Answer {
    /// The bytes. Words are cut to [`WORDS_BYTES_MAX`].
    pub fn encode(&self) -> Vec<u8> {
        let (version, status, window_bytes, words) = match self {
            Answer::Accepted { version, window_bytes } => (*version, 1, *window_bytes, ""),
            Answer::Refused { why } => (0, 2, 0, cut(why, WORDS_BYTES_MAX)),
        };
        let mut bytes = Vec::with_capacity(ANSWER_BYTES + words.len());
        bytes.extend(MAGIC);
        bytes.extend(u16::to_le_bytes(version));
        bytes.extend([status, 0]);
        bytes.extend((words.len() as u32).to_le_bytes());
        bytes.extend(u64::to_le_bytes(window_bytes));
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&bytes), words.as_bytes());
        bytes.extend(checksum.to_le_bytes());
        bytes.extend(words.as_bytes());
        bytes
    }
}

impl AnswerHead {
    /// Reads the head. A refusal looks the same in every version.
    pub fn decode(bytes: &[u8; ANSWER_BYTES]) -> Result<AnswerHead, HandshakeError> {
        check_magic(bytes)?;
        let (version, status) = (u16_at(bytes, 8), bytes[10]);
        if !(1..=2).contains(&status) || bytes[11] != 0 {
            return Err(HandshakeError::Malformed("an unknown answer"));
        }
        let words_bytes = u32_at(bytes, 12) as usize;
        if words_bytes > WORDS_BYTES_MAX || status != 2 && words_bytes > 0 {
            return Err(HandshakeError::Malformed("a text too long"));
        }
        let window_bytes = if status == 1 { window_at(bytes, 16)? } else { 0 };
        if status == 1 && !(VERSION_MIN..=VERSION_MAX).contains(&version) {
            return Err(HandshakeError::Version { min: version, max: version });
        }
        Ok(AnswerHead {
            version,
            status,
            words_bytes,
            window_bytes,
            checksum_so_far: crc32c::crc32c(&bytes[..24]),
            checksum: u32_at(bytes, 24),
        })
    }

    /// The whole, once the text has been read.
    pub fn complete(self, words: &[u8]) -> Result<Answer, HandshakeError> {
        check_sum(self.checksum, crc32c::crc32c_append(self.checksum_so_far, words))?;
        Ok(match self.status {
            1 => Answer::Accepted { version: self.version, window_bytes: self.window_bytes },
            _ => Answer::Refused { why: String::from_utf8_lossy(words).into_owned() },
        })
    }
}

/// The longest beginning of `text` of at most `bytes_max` bytes that ends between characters.
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

fn check_magic(bytes: &[u8]) -> Result<(), HandshakeError> {
    let mut magic = [0; 8];
    magic.copy_from_slice(&bytes[..8]);
    if magic == MAGIC { Ok(()) } else { Err(HandshakeError::Magic(magic)) }
}

fn check_sum(announced: u32, found: u32) -> Result<(), HandshakeError> {
    if found == announced { Ok(()) } else { Err(HandshakeError::Checksum { announced, found }) }
}

fn window_at(bytes: &[u8], at: usize) -> Result<u64, HandshakeError> {
    let window = u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32;
    if (WINDOW_BYTES_MIN..=WINDOW_BYTES_MAX).contains(&window) {
        Ok(window)
    } else {
        Err(HandshakeError::Malformed("credit out of bounds"))
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
