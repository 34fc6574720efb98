package pluginhost

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// attachTask is one goroutine that attaches a slot.
type attachTask struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// scheduleAttachLocked attaches a slot over a link, or has it attached once more
// when a task is under way: settings may have changed since it asked for them.
// mu is held.
func (m *Manager) scheduleAttachLocked(l *link, s *slot) {
	if s.task != nil {
		s.again = true
		return
	}
	ctx, cancel := context.WithCancelCause(l.life)
	t := &attachTask{cancel: cancel, done: make(chan struct{})}
	s.task, s.again = t, false
	l.tasks.Go(func() {
		defer close(t.done)
		defer cancel(nil)
		for {
			m.attach(ctx, l, s)
			m.mu.Lock()
			if !s.again || ctx.Err() != nil {
				s.task = nil
				m.mu.Unlock()
				return
			}
			s.again = false
			m.mu.Unlock()
		}
	})
}

// errAttachLate is the cause of an attach that took too long.
var errAttachLate = errdefs.New(errdefs.Unavailable, "the slot did not attach within %s", AttachWithin)

// attach attaches a slot once and records how that went.
func (m *Manager) attach(ctx context.Context, l *link, s *slot) {
	p, inst := s.pool, s.inst
	free, err := p.life.acquire(ctx)
	if err != nil {
		return
	}
	defer free()
	if !m.slotCurrent(l, s) {
		return
	}
	m.counter.attaches.Add(1)
	bounded, cancel := context.WithTimeoutCause(ctx, AttachWithin, errAttachLate)
	defer cancel()
	told, err := m.converse(bounded, l, s)
	if err == nil {
		m.counter.attached.Add(1)
		return
	}
	late := errors.Is(context.Cause(bounded), errAttachLate)
	if late {
		err = errAttachLate
	}
	m.mu.Lock()
	if ctx.Err() != nil || !m.slotCurrentLocked(l, s) {
		m.mu.Unlock()
		return // fenced, detached, or the worker has gone: who did that tells the worker, and the record
	}
	gone := inst.plugin
	inst.plugin, s.ready = nil, false
	inst.state, inst.code, inst.message = pluginwire.StateFailed, pluginwire.ErrorSlotAttach, errText(err)
	m.mu.Unlock()
	m.counter.attachFailures.Add(1)
	if late {
		m.counter.attachTimeouts.Add(1)
	}
	if gone != nil {
		gone.end(errDisconnected(gone.ID()))
	}
	inst.logs.Add(time.Now(), "ERROR", errText(err))
	m.log.Warn("a plugin slot could not be attached", "installation", inst.binding.InstallationUUID, "err", err)
	if told || gone != nil { // an update that failed early: the worker still has the slot as it was
		l.conn.CancelMatching(inst.binding)
		m.tellDetached(l, inst.binding)
	}
}

// slotCurrent reports whether a slot is still to be attached over a link.
func (m *Manager) slotCurrent(l *link, s *slot) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.slotCurrentLocked(l, s)
}

func (m *Manager) slotCurrentLocked(l *link, s *slot) bool {
	b := s.inst.binding
	return !m.closing && s.pool.link == l && s.pool.slots[b] == s && s.inst.slot == s && s.inst.enabled && m.currentLocked(b)
}

// converse asks LangBot for the slot's settings, gives them to the worker, and
// reads back what it made of them. After every answer it looks whether the slot
// is still wanted. told is whether the worker heard of the slot.
func (m *Manager) converse(ctx context.Context, l *link, s *slot) (told bool, err error) {
	inst := s.inst
	b := inst.binding
	id := Container{Author: inst.artifact.Manifest.Author, Name: inst.artifact.Manifest.Name}
	set, err := m.settingsOf(ctx, b, id)
	if err != nil {
		return false, err
	}
	if !m.slotCurrent(l, s) {
		return false, errSlotLeft()
	}
	// The bound of the whole attach is the only one: it knows more than 15 s.
	untimed := rpc.CallOptions{Context: b, Timeout: -1, CancelPeer: true}
	if _, err := l.conn.Call(ctx, pluginwire.ActionAttachPluginSlot, map[string]json.RawMessage{"plugin_settings": set.raw}, untimed); err != nil {
		return true, err
	}
	if !m.slotCurrent(l, s) {
		return true, errSlotLeft()
	}
	raw, err := l.conn.Call(ctx, pluginwire.ActionGetPluginSlotContainer, struct{}{}, untimed)
	if err != nil {
		return true, err
	}
	c, err := decodeContainer(raw)
	if err != nil {
		return true, err
	}
	if c.ID() != id.ID() {
		return true, errdefs.New(errdefs.Denied, "the slot's plugin calls itself %s, its artifact is %s", c.ID(), id.ID())
	}
	if c.Status != StatusInitialized {
		return true, errdefs.New(errdefs.Unavailable, "the slot's plugin is %q after attaching, not initialized", c.Status)
	}
	c = c.with(set, false)
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.slotCurrentLocked(l, s) {
		return true, errSlotLeft()
	}
	if inst.plugin == nil {
		inst.plugin = newPlugin(l, b, c, inst.logs)
	} else {
		inst.plugin.setContainer(c)
	}
	s.ready = true
	inst.state, inst.code, inst.message = pluginwire.StateRunning, "", ""
	return true, nil
}

func errSlotLeft() error {
	return errdefs.New(errdefs.Denied, "the slot was detached while it was being attached")
}

// tellDetached tells the worker that a slot has left; that it cannot be told is
// no matter, for nothing of the slot is admitted any more.
func (m *Manager) tellDetached(l *link, b pluginwire.Context) {
	ctx, cancel := context.WithTimeout(context.Background(), DetachWithin)
	defer cancel()
	stop := context.AfterFunc(l.life, cancel)
	defer stop()
	if _, err := l.conn.Call(ctx, pluginwire.ActionDetachPluginSlot, struct{}{}, rpc.CallOptions{Context: b, Timeout: DetachWithin}); err != nil {
		m.log.Debug("a shared worker did not detach a slot", "installation", b.InstallationUUID, "err", err)
	}
}

// detach takes an installation out of its pool: from the first line on nothing of
// its binding is admitted. Its attach is cancelled and waited for, its requests
// under way are cancelled, and no one else's; then the worker is told. It does not
// wait for the attach of a sibling, which may hang. The last one stops the process.
func (m *Manager) detach(inst *installation, cause error) {
	m.mu.Lock()
	s := inst.slot
	if s == nil {
		m.mu.Unlock()
		return
	}
	p := s.pool
	inst.slot = nil
	if p.slots[inst.binding] == s {
		delete(p.slots, inst.binding)
	}
	task, plugin, l := s.task, inst.plugin, p.link
	s.again, s.ready = false, false
	inst.plugin = nil
	last := len(p.slots) == 0
	m.mu.Unlock()
	m.counter.detaches.Add(1)
	if plugin != nil {
		plugin.end(cause)
	}
	if task != nil {
		task.cancel(cause)
	}
	if last && m.stopPool(p, cause) {
		return
	}
	if task != nil {
		<-task.done
	}
	if l == nil {
		return
	}
	l.conn.CancelMatching(inst.binding)
	m.tellDetached(l, inst.binding)
	if err := l.holder.Sweep(); err != nil {
		m.log.Warn("files of a slot that has left stay until its worker ends", "installation", inst.binding.InstallationUUID, "err", err)
	}
}
