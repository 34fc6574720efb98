package pluginwire

import "time"

// The limits of a message and of the two framings, from the published SDK
// 0.5.5–0.7. Sizes are bytes of UTF-8.
const (
	// MaxMessage is the largest message, either way. A sender refuses a larger one
	// before it is sent; a receiver closes the connection.
	MaxMessage = 16 << 20
	// MaxFragments is how many lines one message may take. The frames of a WebSocket are
	// not counted: they are bounded by MaxMessage.
	MaxFragments = 4096
	// StdioInline is the largest message that is sent as one plain line.
	StdioInline = 16 << 10
	// StdioLine is the limit of a Python peer for one line, newline excluded: a
	// longer one ends its connection. No line of ours reaches it.
	StdioLine = 64 << 10
	// WSFragment is the largest WebSocket frame that is sent.
	WSFragment = 64 << 10
	// MaxID bounds an id inside a context, an action's name and the like. Ours; the
	// peers have no limit.
	MaxID = 512
)

// The limits of one connection.
const (
	// MaxInflight is how many inbound actions run at once on a connection.
	MaxInflight = 128
	// InflightBytes is how much data the inbound actions of a connection may hold at
	// once. Ours: without it 128 messages of the largest size are 2 GiB.
	InflightBytes = 64 << 20
	// ReservedLane is how many more may run of those that must not wait behind
	// others: the control connection's __ping, register_plugin.
	ReservedLane = 4
	// CancelLane is how many __cancel_action may run: one for each of the others. Ours;
	// in the reserved lane, where the peers have them, most of a burst would be refused,
	// and what they were to cancel would go on.
	CancelLane = MaxInflight + ReservedLane
	// AckLane is how many answers of the connection itself (acknowledgements of
	// stream frames, "busy") wait to be written before reading pauses.
	AckLane = 128
	// FlowWindow is how many frames of a stream may be unacknowledged.
	FlowWindow = 8
	// AckEvery is after how many processed frames a caller acknowledges.
	AckEvery = 4
	// MaxStreamFrame is the largest data frame of a flow-controlled stream, encoded.
	MaxStreamFrame = 1 << 20
	// StreamBufferFrames and StreamBufferBytes bound what a caller keeps of a stream
	// that it has not read. Beyond, the stream fails and the peer is told.
	StreamBufferFrames = 128
	StreamBufferBytes  = 8 << 20
	// ErrorText is the longest error text, in characters.
	ErrorText = 4096
)

// The times of the protocol.
const (
	DefaultTimeout = 15 * time.Second // of a call that names none, and of each frame of a stream
	// MaxTimeout bounds a time that a plugin asks for in a payload: the longest in
	// the table of actions.
	MaxTimeout = 1200 * time.Second
)
