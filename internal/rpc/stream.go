package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Stream is the answer to one streaming request. One goroutine reads it; any may close
// it. It must be read to its end or closed.
type Stream struct {
	c       *Conn
	id      int64
	action  string
	on      pluginwire.Context
	timeout time.Duration // of each frame; negative: none

	wake chan struct{} // a frame or the end came

	// The reader's.
	timer *time.Timer
	owed  int // the index to acknowledge before the next frame; 0: none

	mu     sync.Mutex
	frames []frame
	bytes  int // of frames
	index  int // of the last frame that came
	err    error
}

type frame struct {
	data  json.RawMessage
	index int
}

// Stream sends a request whose answer is a stream. It offers flow control; a peer that
// does not know it just sends. Errors are those of Call.
func (c *Conn) Stream(ctx context.Context, action string, data any, o CallOptions) (*Stream, error) {
	raw, err := encode(data)
	if err != nil {
		return nil, err
	}
	s := &Stream{c: c, action: action, on: o.Context, timeout: o.timeout(), wake: make(chan struct{}, 1)}
	s.timer = time.NewTimer(time.Hour)
	s.timer.Stop()
	if s.id, err = c.expect(s); err != nil {
		return nil, err
	}
	err = c.sendRequest(ctx, s.arm(), &pluginwire.OutRequest{Seq: s.id, Action: action, Data: raw, Context: o.Context, FlowControl: true})
	s.timer.Stop()
	if err != nil {
		c.forget(s.id)
		if errors.Is(err, ErrTimeout) {
			c.timeouts.Add(1)
			err = timeoutError(action, s.timeout)
		}
		return nil, err
	}
	return s, nil
}

func (s *Stream) arm() <-chan time.Time {
	if s.timeout < 0 {
		return nil
	}
	s.timer.Reset(s.timeout)
	return s.timer.C
}

// frameOverhead is what a frame that waits costs beside its data.
const frameOverhead = 64

func (s *Stream) deliver(r *pluginwire.Response, own bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return true
	}
	defer s.rouse()
	switch {
	case r.Code != 0:
		s.err = &PeerError{Action: s.action, Message: r.Message, Data: keep(r.Data, own)}
		return true
	case r.Chunk == pluginwire.ChunkEnd:
		s.err = io.EOF
		return true
	case r.StreamIndex != 0 && r.StreamIndex != s.index+1 || r.StreamIndex == 0 && s.index != 0:
		s.breakOff(streamError("the stream of %s is out of order: frame %d after %d", s.action, r.StreamIndex, s.index))
		return true
	case r.StreamIndex != 0 && len(s.frames) >= pluginwire.StreamBufferFrames:
		// A peer with flow control keeps to its window. One without (SDK 0.5 and 0.6)
		// writes a burst as fast as it can, which is no fault: it is bound by bytes.
		s.breakOff(streamError("the stream of %s has more than %d unread frames", s.action, pluginwire.StreamBufferFrames))
		return true
	case s.bytes+len(r.Data)+frameOverhead > pluginwire.StreamBufferBytes:
		s.breakOff(streamError("the stream of %s has more than %d unread bytes", s.action, pluginwire.StreamBufferBytes))
		return true
	}
	s.index = r.StreamIndex
	s.bytes += len(r.Data) + frameOverhead
	s.frames = append(s.frames, frame{keep(r.Data, own), r.StreamIndex})
	return false
}

// breakOff ends the stream from this side: what is buffered is dropped, the peer told.
func (s *Stream) breakOff(err error) {
	s.err, s.frames, s.bytes = err, nil, 0
	s.c.cancelPeer(s.id, s.on)
}

func (s *Stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	s.rouse()
}

func (s *Stream) rouse() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Next returns the next frame, and io.EOF after the last. A frame counts as processed,
// for the peer's flow control, when Next is called again. Other errors are those of
// Call, and one that wraps ErrStream when the peer broke the stream's rules; they end
// the stream, save for the end of ctx.
func (s *Stream) Next(ctx context.Context) (json.RawMessage, error) {
	if s.owed > 0 {
		if err := s.acknowledge(ctx); err != nil {
			return nil, err
		}
	}
	waiting := false
	var expired <-chan time.Time
	for {
		s.mu.Lock()
		if len(s.frames) > 0 {
			f := s.frames[0]
			s.frames[0] = frame{}
			if s.frames = s.frames[1:]; len(s.frames) == 0 {
				s.frames = nil
			}
			s.bytes -= len(f.data) + frameOverhead
			s.mu.Unlock()
			if f.index%pluginwire.AckEvery == 0 {
				s.owed = f.index
			}
			if waiting {
				s.timer.Stop()
			}
			return f.data, nil
		}
		err := s.err
		s.mu.Unlock()
		if err != nil {
			if waiting {
				s.timer.Stop()
			}
			return nil, err
		}
		if !waiting {
			expired, waiting = s.arm(), true
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			s.timer.Stop()
			return nil, context.Cause(ctx)
		case <-expired:
			s.c.timeouts.Add(1)
			s.giveUp(timeoutError(s.action, s.timeout))
			waiting = false
		}
	}
}

// acknowledge tells the peer that the frame owed was processed. The answer to it is of
// no interest: a peer that does not know the stream any more ends it otherwise.
func (s *Stream) acknowledge(ctx context.Context) error {
	s.mu.Lock()
	over := s.err != nil
	s.mu.Unlock()
	if over {
		s.owed = 0
		return nil
	}
	data := strconv.AppendInt([]byte(`{"seq_id":`), s.id, 10)
	data = strconv.AppendInt(append(data, `,"index":`...), int64(s.owed), 10)
	err := s.c.sendRequest(ctx, s.arm(), &pluginwire.OutRequest{
		Seq: s.c.seq.Add(1), Action: pluginwire.ActionStreamAck, Data: append(data, '}'), Context: s.on,
	})
	s.timer.Stop()
	if err == nil {
		s.owed = 0
	} else if errors.Is(err, ErrTimeout) {
		err = timeoutError(pluginwire.ActionStreamAck, s.timeout)
	}
	return err
}

// giveUp ends the stream from this side, unless it has ended.
func (s *Stream) giveUp(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil && s.c.forget(s.id) {
		s.breakOff(err)
	}
	s.rouse()
}

// Close ends the stream and tells the peer, if it has not ended. It may be called
// again.
func (s *Stream) Close() {
	s.giveUp(streamError("the stream of %s was closed", s.action))
	s.mu.Lock()
	s.frames, s.bytes = nil, 0
	s.mu.Unlock()
}
