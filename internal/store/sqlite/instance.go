package sqlite

import (
	"context"
	"crypto/rand"

	"github.com/stockade-run/stockade/internal/ident"
)

func instanceID() string {
	var random [16]byte
	rand.Read(random[:]) // never fails: the runtime ends the program instead
	return ident.From(ident.Instance, random)
}

// Instance implements [store.Store].
func (s *Store) Instance(ctx context.Context) (string, error) {
	id, err := queryOne(ctx, s.reads, func(r row) (string, error) {
		var id string
		return id, r.Scan(&id)
	}, `SELECT id FROM instance`)
	return id, s.dbError(err, "reading the id of the ledger")
}

// NextGeneration implements [store.Store].
func (s *Store) NextGeneration(ctx context.Context) (int64, error) {
	var n int64
	err := s.change(ctx, "raising the server's generation", func(t *tx) (err error) {
		if _, err = t.exec(`UPDATE instance SET generation = generation + 1`); err != nil {
			return err
		}
		n, err = t.count(`SELECT generation FROM instance`)
		return err
	})
	if err != nil {
		return 0, err
	}
	return n, nil
}

// change runs do in the writer's transaction and returns when it is durable.
func (s *Store) change(ctx context.Context, doing string, do func(*tx) error) error {
	return s.dbError(s.write.submit(ctx, do), "%s", doing)
}
