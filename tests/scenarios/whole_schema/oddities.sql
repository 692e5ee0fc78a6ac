-- What no sample shows and real databases have.
CREATE SCHEMA "Odd ""Schema"".x";
SET search_path = "Odd ""Schema"".x";
CREATE TYPE "Point.3" AS (x double precision, "Y y" text, z numeric(10,2)[]);
CREATE TYPE mood AS ENUM ('sad', 'o''k', 'very "happy"', 'back\slash');
CREATE TYPE nested AS (p "Point.3", m mood[], d date);
CREATE TYPE float_range AS RANGE (subtype = float8, subtype_diff = float8mi);
CREATE FUNCTION doubled(n integer) RETURNS integer IMMUTABLE LANGUAGE sql AS 'SELECT n * 2';
CREATE FUNCTION is_fine(t text) RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS
  $$ BEGIN RETURN t IS DISTINCT FROM 'bad'; END $$;
CREATE DOMAIN fine_text AS text CHECK ("Odd ""Schema"".x".is_fine(VALUE));
CREATE DOMAIN fine_texts AS fine_text[];
CREATE SEQUENCE shared INCREMENT BY -5 MINVALUE -100000 MAXVALUE -1 START -1 CACHE 3 CYCLE;
CREATE TABLE "select" ("from" integer GENERATED ALWAYS AS IDENTITY (START 100 INCREMENT 10) PRIMARY KEY,
  "where ""x""" text DEFAULT 'it''s \ "so"', "Ünï" bigint DEFAULT nextval('shared'), "dot.ted" nested,
  pts "Point.3"[], r float_range, rs float_multirange, f fine_text, fs fine_texts,
  twice integer GENERATED ALWAYS AS ("Odd ""Schema"".x".doubled(n)) STORED, n integer DEFAULT doubled(4));
CREATE INDEX "Index of ""select""" ON "select" (doubled(n) DESC NULLS LAST, "where ""x""" text_pattern_ops)
  WHERE n > 0;
COMMENT ON COLUMN "select"."where ""x""" IS 'quo''ted';
CREATE TABLE parent (id serial PRIMARY KEY, kind text NOT NULL DEFAULT 'p',
  size integer GENERATED ALWAYS AS (length(kind)) STORED, CONSTRAINT kinds CHECK (kind <> ''));
CREATE TABLE child (more integer[] DEFAULT '{1,2}', PRIMARY KEY (id)) INHERITS (parent);
ALTER TABLE child ALTER kind SET DEFAULT 'c';
CREATE TABLE tree (a integer, b text, c date, v text, PRIMARY KEY (a, b)) PARTITION BY LIST (b);
CREATE TABLE tree_x PARTITION OF tree FOR VALUES IN ('x', 'y''z', NULL) PARTITION BY HASH (a);
CREATE TABLE tree_x0 PARTITION OF tree_x FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE tree_x1 PARTITION OF tree_x FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE TABLE tree_w PARTITION OF tree FOR VALUES IN ('w');
ALTER TABLE tree ADD UNIQUE (b, a, v);
CREATE TABLE refers (a integer, b text, n integer, e integer UNIQUE DEFERRABLE INITIALLY DEFERRED,
  FOREIGN KEY (a, b) REFERENCES tree ON DELETE CASCADE);
ALTER TABLE refers REPLICA IDENTITY FULL;
ALTER TABLE refers ADD CONSTRAINT not_zero CHECK (n <> 0) NOT VALID;
CREATE TABLE by_index (a integer NOT NULL, b text NOT NULL, c text);
CREATE UNIQUE INDEX by_index_key ON by_index (b, a);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_key;
CREATE TABLE zz_row (x integer PRIMARY KEY, y text);
CREATE TABLE aa_of_rows (id integer PRIMARY KEY, r zz_row, rs zz_row[]);
INSERT INTO aa_of_rows VALUES (1, ROW(1, 'a')::zz_row, ARRAY[ROW(2, 'b,"')::zz_row, NULL]);
CREATE TABLE nothing_at_all ();
CREATE TABLE empty_ones (id integer PRIMARY KEY);
INSERT INTO "select" ("dot.ted", pts, r, rs, f, fs, n) SELECT
  ROW(ROW(i, 'y,"' || i, ARRAY[1.5, NULL])::"Point.3", ARRAY['o''k', 'very "happy"', NULL]::mood[], '2020-02-29')::nested,
  ARRAY[ROW(1, NULL, '{}')::"Point.3", NULL], float_range(i, i + 0.5), '{[1,2),[5,6]}', 'f' || i,
  ARRAY['a', 'b,"']::fine_texts, i FROM generate_series(1, 100) i;
INSERT INTO parent SELECT FROM generate_series(1, 20);
INSERT INTO child (more) SELECT ARRAY[i, NULL] FROM generate_series(1, 20) i;
INSERT INTO tree SELECT i, (ARRAY['x', 'y''z', 'w'])[1 + i % 3], '2021-01-01', 'v' || i FROM generate_series(1, 100) i;
INSERT INTO refers SELECT a, b, a, a FROM tree WHERE a < 50;
INSERT INTO by_index SELECT i, 'b' || i % 10, 'c' FROM generate_series(1, 100) i;
